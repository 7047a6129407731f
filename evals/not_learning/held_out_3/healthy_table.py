"""Healthy programs that are made of a task and a recipe."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as schedules

from evals.not_learning.held_out_3 import shared, tasks
from evals.not_learning.program import follow, healthy

SCHEDULES: dict[str, Callable[[Any, int], Any]] = {
    "cosine": schedules.CosineAnnealingLR,
    "restarts": lambda o, _: schedules.CosineAnnealingWarmRestarts(o, 60, 2),
    "one_cycle": lambda o, n: schedules.OneCycleLR(o, o.param_groups[0]["lr"], n),
    "warm": lambda o, _: schedules.LinearLR(o, 0.01, total_iters=60),
    "stairs": lambda o, n: schedules.StepLR(o, n // 3, 0.3),
    "fading": lambda o, n: schedules.ExponentialLR(o, 0.01 ** (1 / n)),
    "triangle": lambda o, n: schedules.CyclicLR(
        o, o.param_groups[0]["lr"] / 10, o.param_groups[0]["lr"], n // 6
    ),
    "root": lambda o, _: schedules.LambdaLR(o, lambda k: min((k + 1) / 40, (40 / (k + 1)) ** 0.5)),
    "trapezoid": lambda o, n: schedules.LambdaLR(
        o, lambda k: min(1, (k + 1) / 20, 1.02 - k / n, 1) ** 0.5
    ),
    "once": lambda o, n: schedules.MultiStepLR(o, [n * 3 // 4], 0.1),
}


class Signs(optim.Optimizer):
    """Lion: steps by the sign of an interpolated momentum."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Make a step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.sub_(m.lerp(p.grad, 0.1).sign_(), alpha=group["lr"])
                    m.lerp_(p.grad, 0.01)


OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": optim.SGD,
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "rms": optim.RMSprop,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rprop": optim.Rprop,
    "lion": Signs,
    "adamax": optim.Adamax,
    "asgd": optim.ASGD,
    "lbfgs": optim.LBFGS,
    "sparse": optim.SparseAdam,
}


class HealthyTable(shared.Twins):
    """Programs of the table below."""

    def apply(
        self,
        task: tasks.Task,
        *,
        by: str = "adam",
        lr: float = 0.002,
        steps: int = 300,
        plan: str = "",
        clip: float = 0,
        style: str = "",
        every: int = 1,
        **options: Any,
    ) -> None:
        """Train by a recipe."""
        model, self.need = task.model, task.need
        params: Any = [p for p in model.parameters() if p.requires_grad]
        if style == "groups":
            params = [
                {"params": [p], "lr": lr * 0.8**i, "weight_decay": 0.1 * (p.dim() > 1)}
                for i, p in enumerate(reversed(params))
            ]
        optimizer = OPTIMIZERS[by](params, lr=lr, **options)
        schedule = SCHEDULES[plan](optimizer, steps) if plan else None
        average = copy.deepcopy(model) if style in ("average", "swa", "lookahead") else model
        if style == "thaw":
            next(iter(model.children())).requires_grad_(False)
        for step, batch in self.watched(enumerate(task.draw(steps * every)), model, optimizer):
            if by == "lbfgs":
                optimizer.step(lambda batch=batch: self.back(optimizer, task.loss(*batch)))
                continue
            if step % every == 0:
                optimizer.zero_grad()
            if style == "bf16":
                with torch.autocast("cpu", torch.bfloat16):
                    loss = task.loss(*batch)
            elif style == "flood":
                loss = (task.loss(*batch) - 0.1).abs() + 0.1
            else:
                loss = task.loss(*batch)
            if style == "thaw" and step == steps // 2:
                model.requires_grad_(True)
            (loss / every).backward()
            if style == "noise":
                for p in params:
                    p.grad.add_(torch.randn_like(p.grad), alpha=0.05 / (1 + step) ** 0.55)
            if style == "sam":
                self.climb(params, optimizer, task, batch)
            if style == "skip" and loss.item() > 50:
                continue
            if step % every == every - 1:
                if clip:
                    nn.utils.clip_grad_norm_(params, clip)
                optimizer.step()
                if schedule is not None:
                    schedule.step()
            if style == "average":
                follow(average, model, 0.05)
            elif style == "swa" and step >= steps // 2:
                follow(average, model, 1 / (step - steps // 2 + 1))
            elif style == "lookahead" and step % 5 == 4:
                follow(average, model, 0.5)
                model.load_state_dict(average.state_dict())
            elif style == "watchful" and step % 50 == 49:
                task.score(model)
            elif style == "decay":
                with torch.no_grad():
                    for p in params:
                        p.mul_(1 - 0.02 * lr)
        if style in ("average", "swa"):
            for slow, fast in zip(average.buffers(), model.buffers(), strict=True):
                slow.copy_(fast)
        self.score = task.score(average)

    @staticmethod
    def back(optimizer: optim.Optimizer, loss: Tensor) -> Tensor:
        """Clear the gradients and go back."""
        optimizer.zero_grad()
        loss.backward()
        return loss

    @staticmethod
    def climb(
        params: list[Tensor], optimizer: optim.Optimizer, task: tasks.Task, batch: Any
    ) -> None:
        """Take the gradients at a nearby point with a higher loss, and come back."""
        kept = [p.detach().clone() for p in params]
        size = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
        with torch.no_grad():
            for p in params:
                p.add_(p.grad, alpha=0.05 / (size.item() + 1e-9))  # type: ignore[arg-type]
        HealthyTable.back(optimizer, task.loss(*batch))
        with torch.no_grad():
            for p, value in zip(params, kept, strict=True):
                p.copy_(value)


Row = tuple[Callable[..., tasks.Task], tuple[Any, ...], dict[str, Any], dict[str, Any]]


def row(
    build: Callable[..., tasks.Task], *of: Any, task: dict[str, Any] | None = None, **recipe: Any
) -> Row:
    """Return a program: a task with its arguments, and how to train it."""
    return build, of, task or {}, recipe


d, t, p, r = tasks.digits, tasks.table, tasks.points, tasks.regress
TABLE = {
    "digits_linear": row(d, "linear", by="sgd", lr=0.3),
    "digits_mlp": row(d),
    "digits_wide_lion": row(d, "wide", by="lion", lr=2e-4),
    "digits_deep_residual": row(d, "deep", by="adamw", lr=0.002, plan="cosine"),
    "digits_sigmoid": row(d, "sigmoid", by="sgd", lr=1.0, momentum=0.5, steps=600),
    "digits_selu_nadam": row(d, "selu", by="nadam", lr=0.001),
    "digits_tanh_deep": row(d, "plain_deep", lr=0.002, clip=0.5, steps=400),
    "digits_bottleneck": row(d, "bottleneck", lr=0.005, steps=500, task={"need": 0.7}),
    "digits_much_dropout": row(d, "dropout", lr=0.002, steps=400),
    "digits_batch_norm_cycle": row(d, "batch", by="sgd", lr=0.2, momentum=0.9, plan="one_cycle"),
    "digits_group_norm": row(d, "group", by="adamw", lr=0.003, weight_decay=0.3),
    "digits_instance_norm": row(d, "instance", by="rms", lr=0.001),
    "digits_no_norm_nesterov": row(d, "none", by="sgd", lr=0.03, momentum=0.9, nesterov=True),
    "digits_separable": row(d, "separable", lr=0.005, steps=500, task={"need": 0.8}),
    "digits_spectral": row(d, "spectral", lr=0.003, steps=400),
    "digits_weight_norm": row(d, "weight_norm", by="adamax", lr=0.004),
    "digits_by_rows": row(d, "rows", lr=0.005, clip=1.0, plan="stairs"),
    "digits_both_ways": row(
        d, "both_ways", by="nadam", lr=0.01, plan="cosine", steps=400, task={"need": 0.8}
    ),
    "digits_patches": row(
        d, "patches", task={"need": 0.82}, by="adamw", lr=0.003, plan="root", steps=350
    ),
    "digits_rounded_weights": row(d, "rounded", lr=0.002, plan="cosine"),
    "digits_head_of_zeros": row(d, "zero_head", by="sgd", lr=0.1, momentum=0.9),
    "digits_experts": row(d, "experts", lr=0.004, steps=400),
    "digits_random_features": row(d, "random_features", by="sgd", lr=0.1, steps=400),
    "digits_huge_batch": row(d, "mlp", task={"size": 1400}, lr=0.01, steps=120),
    "digits_batches_of_two": row(d, "mlp", task={"size": 2}, by="sgd", lr=0.02, steps=2500),
    "digits_single_samples": row(
        d, "wide", task={"size": 1, "need": 0.8}, by="sgd", lr=0.01, steps=2000
    ),
    "digits_forty_rows": row(
        d, "mlp", task={"rows": 40, "need": 0.45}, lr=0.005, weight_decay=1e-3
    ),
    "digits_ten_rows_each": row(
        d, "batch", task={"rows": 100, "size": 20, "need": 0.65}, by="adamw", lr=0.003
    ),
    "digits_half_wrong_labels": row(
        d, "mlp", task={"noise": 0.5, "need": 0.75}, by="sgd", lr=0.1, steps=250
    ),
    "digits_mostly_wrong_labels": row(
        d, "linear", task={"noise": 0.8, "need": 0.5}, by="sgd", lr=0.03, steps=400
    ),
    "digits_smoothed": row(d, "wide", task={"smooth": 0.3}, by="adamw"),
    "digits_mixup": row(d, "wide", task={"kind": "mixup"}, lr=0.003, steps=400),
    "digits_focal": row(d, "group", task={"kind": "focal"}, lr=0.003),
    "digits_confident_penalty": row(d, "mlp", task={"kind": "entropy"}, by="rms", lr=0.001),
    "digits_squares": row(d, "mlp", task={"kind": "mse"}, lr=0.003),
    "digits_margins": row(d, "mlp", task={"kind": "margin"}, by="sgd", lr=0.3, momentum=0.9),
    "digits_one_against_rest": row(d, "selu", task={"kind": "each"}, lr=0.002),
    "digits_summed_loss": row(d, "mlp", task={"kind": "sum"}, by="sgd", lr=0.003, momentum=0.9),
    "digits_shifted": row(d, "batch", task={"shift": True}, lr=0.003, steps=400),
    "digits_rare_classes": row(
        d, "mlp", task={"rare": True, "need": 0.8}, by="adamw", lr=0.003, steps=400
    ),
    "digits_accumulated": row(
        d, "wide", task={"size": 8}, every=8, by="adamw", lr=0.003, steps=150
    ),
    "digits_average": row(d, "batch", style="average", by="sgd", lr=0.05, momentum=0.9),
    "digits_swa": row(d, "mlp", style="swa", by="sgd", lr=0.3, momentum=0.9),
    "digits_lookahead": row(d, "mlp", style="lookahead", lr=0.004),
    "digits_sam": row(d, "wide", style="sam", by="sgd", lr=0.1, momentum=0.9, steps=250),
    "digits_bf16": row(d, "wide", style="bf16", lr=0.002),
    "digits_thaw": row(d, "deep", style="thaw", lr=0.003),
    "digits_noisy_gradients": row(d, "mlp", style="noise", by="sgd", lr=0.2),
    "digits_layerwise_rates": row(d, "plain_deep", style="groups", by="adamw", lr=0.006, steps=400),
    "digits_flooded": row(d, "wide", style="flood", lr=0.002),
    "digits_watchful": row(d, "dropout", style="watchful", lr=0.003),
    "digits_heavy_decay": row(d, "wide", by="adamw", lr=0.002, weight_decay=5.0),
    "digits_decay_by_hand": row(d, "mlp", style="decay", by="sgd", lr=0.2, momentum=0.9),
    "digits_restarts": row(d, "group", plan="restarts", by="sgd", lr=0.1, momentum=0.9),
    "digits_long_past_zero": row(d, "wide", task={"rows": 300, "need": 0.8}, lr=0.003, steps=1200),
    "wine_lbfgs": row(t, "wine", task={"size": 133}, by="lbfgs", lr=0.5, steps=20),
    "wine_rprop": row(t, "wine", 16, task={"size": 133}, by="rprop", lr=0.01, steps=80),
    "wine_one_sample": row(t, "wine", 24, task={"size": 1}, by="sgd", lr=0.01, steps=1000),
    "iris_linear": row(t, "iris", by="sgd", lr=0.1, plan="once", steps=400),
    "iris_adadelta": row(t, "iris", 16, 16, by="adadelta", lr=1.0, steps=400),
    "iris_tiny_steps": row(
        t, "iris", 32, by="sgd", lr=0.004, momentum=0.95, steps=800, task={"need": 0.8}
    ),
    "cancer_adagrad": row(t, "breast_cancer", 16, by="adagrad", lr=0.05),
    "cancer_asgd": row(t, "breast_cancer", by="asgd", lr=0.05),
    "cancer_deep_cyclic": row(t, "breast_cancer", 32, 32, 32, by="sgd", lr=0.1, plan="triangle"),
    "moons_sgd": row(p, "moons", by="sgd", lr=0.2, momentum=0.9),
    "moons_noisy_labels": row(p, "moons", nn.Tanh, task={"noise": 0.7}, lr=0.005, steps=500),
    "moons_coins": row(p, "moons", nn.ReLU, task={"noise": 0.9, "need": 0.75}, lr=0.003, steps=700),
    "rings_softplus": row(p, "rings", nn.Softplus, lr=0.01, plan="cosine", steps=400),
    "rings_radam": row(p, "rings", nn.Mish, by="radam", lr=0.01, plan="warm"),
    "rings_one_cycle": row(p, "rings", by="adamw", lr=0.02, plan="one_cycle"),
    "friedman_sgd": row(r, by="sgd", lr=0.05, momentum=0.9, steps=400),
    "friedman_l1": row(r, "friedman", "l1", lr=0.005, plan="cosine"),
    "friedman_correlation": row(r, "friedman", "correlation", lr=0.003),
    "friedman_large_targets": row(r, "friedman", task={"scale": 1e4}, lr=0.005),
    "friedman_large_targets_l1": row(
        r, "friedman", "l1", task={"scale": 500}, by="adamw", lr=0.01, clip=1.0
    ),
    "friedman_small_targets": row(
        r, "friedman", task={"scale": 0.05}, lr=0.001, plan="cosine", steps=600
    ),
    "friedman_mostly_noise": row(
        r, "friedman", task={"noise": 3.0, "need": 0.1}, weight_decay=0.1, steps=120
    ),
    "friedman_log_cosh": row(r, "friedman", "log_cosh", by="rms", lr=0.002),
    "friedman_median": row(r, "friedman", "half", lr=0.004, plan="fading", steps=400),
    "friedman_skipping": row(r, "friedman", style="skip", by="sgd", lr=0.1, steps=600),
    "curve_tanh": row(
        r, "curve", task={"act": nn.Tanh, "need": 0.5}, lr=0.01, steps=500, plan="cosine"
    ),
    "curve_huber_full_batch": row(
        r, "curve", "huber", task={"size": 1000, "need": 0.5}, lr=0.02, steps=200
    ),
    "curve_wide_shallow": row(
        r, "curve", task={"width": 256, "depth": 1, "need": 0.5}, lr=0.005, steps=500
    ),
    "curve_five_layers": row(
        r, "curve", task={"depth": 5, "need": 0.5}, lr=0.002, plan="warm", steps=500, clip=1.0
    ),
    "diabetes_linear": row(
        r, "diabetes", task={"depth": 0, "need": 0.3}, by="sgd", lr=0.02, weight_decay=0.1
    ),
    "diabetes_raw_units": row(
        r,
        "diabetes",
        task={"scale": 77, "need": 0.3},
        by="adamw",
        lr=0.002,
        weight_decay=1.0,
        steps=200,
    ),
    "diabetes_huber": row(
        r, "diabetes", "huber", task={"width": 12, "need": 0.3}, lr=0.003, steps=250
    ),
    "text_lstm": row(tasks.language, "lstm", lr=0.005, clip=1.0, steps=200),
    "text_two_gru": row(tasks.language, "gru", by="adamw", lr=0.006, steps=200, clip=0.5),
    "text_attention": row(tasks.language, "attention", lr=0.003, plan="root", steps=200),
    "text_window": row(tasks.language, "window", lr=0.005, style="average"),
    "text_pairs": row(tasks.language, "pairs", by="sgd", lr=20.0, task={"need": -3.0}),
    "text_long": row(tasks.language, "gru", task={"length": 40}, lr=0.005, clip=1.0, steps=120),
    "letters_nearly_random": row(
        tasks.language, "gru", task={"chance": 0.72, "need": -2.46}, lr=0.003, clip=1.0
    ),
    "letters_random_pairs": row(
        tasks.language, "pairs", task={"chance": 0.72, "need": -2.46}, lr=0.02
    ),
    "discs_plain": row(tasks.segment, lr=0.005, steps=200),
    "discs_dice": row(tasks.segment, "plain", "dice", lr=0.005, steps=200),
    "discs_ladder": row(
        tasks.segment, "ladder", "both", by="sgd", lr=0.05, momentum=0.9, steps=200
    ),
    "discs_weighted": row(
        tasks.segment, "ladder", "weighted", by="adamw", lr=0.004, steps=200, task={"need": 0.5}
    ),
    "discs_log_dice": row(tasks.segment, "plain", "log", lr=0.005, steps=200),
    "seasons_linear": row(tasks.forecast, by="sgd", lr=0.03, steps=400),
    "seasons_mlp": row(tasks.forecast, "mlp", task={"ahead": 8}, lr=0.004),
    "seasons_gru": row(tasks.forecast, "gru", lr=0.01, clip=1.0, steps=200, plan="cosine"),
    "seasons_dilated": row(tasks.forecast, "conv", task={"ahead": 4}, by="nadam", lr=0.003),
    "seasons_change": row(tasks.forecast, "change", by="adamw", lr=0.005),
    "films_sparse": row(tasks.films, task={"sparse": True}, by="sparse", lr=0.01, steps=700),
    "films_dense": row(
        tasks.films, task={"width": 4}, by="adam", lr=0.02, weight_decay=1e-4, steps=600
    ),
    "films_network": row(tasks.films, task={"net": True}, by="adamw", lr=0.01, steps=600),
    "graph_convolution": row(tasks.nodes, lr=0.01, weight_decay=5e-4, steps=120),
    "graph_simple": row(tasks.nodes, "simple", by="sgd", lr=0.5, steps=200),
    "graph_attention": row(
        tasks.nodes, "attention", by="adamw", lr=0.01, steps=120, weight_decay=0.01
    ),
    "sentences_bag": row(tasks.sentences, lr=0.02),
    "sentences_conv": row(tasks.sentences, "conv", by="adamw", lr=0.004, steps=250),
    "sentences_last_word": row(tasks.sentences, "last", lr=0.008, clip=1.0, steps=350),
    "sentences_attention": row(tasks.sentences, "attention", lr=0.003, plan="warm", steps=150),
    "sentences_pooling": row(tasks.sentences, "pooling", by="adagrad", lr=0.2, steps=250),
    "tags_gru": row(tasks.sequence, "tags", nn.GRU, by="adamw", lr=0.01, steps=250),
    "tags_plain_recurrence": row(tasks.sequence, "tags", nn.RNN, lr=0.005, clip=0.5),
    "first_word_lstm": row(tasks.sequence, "first", nn.LSTM, lr=0.01, clip=1.0),
    "most_counted": row(tasks.sequence, "most", nn.GRU, lr=0.005, steps=400),
    "order_lstm": row(tasks.sequence, "order", nn.LSTM, lr=0.01, clip=1.0, task={"length": 12}),
    "reverse_gru": row(
        tasks.sequence, "reverse", nn.GRU, lr=0.005, clip=1.0, steps=400, task={"length": 5}
    ),
    "tuned_all_tiny_rate": row(tasks.tuned, "all", by="sgd", lr=1e-5, steps=150),
    "tuned_all_near_zero_loss": row(tasks.tuned, "all", by="adamw", lr=1e-4, style="watchful"),
    "tuned_new_digits": row(tasks.tuned, "new", lr=0.002, plan="cosine", steps=400),
    "tuned_head": row(tasks.tuned, "head", lr=0.02, steps=400, task={"need": 0.75}),
    "tuned_biases": row(tasks.tuned, "bias", lr=0.01, steps=400, task={"need": 0.75}),
    "tuned_adapter": row(tasks.tuned, "adapter", by="adamw", lr=0.01),
    "tuned_norm_only": row(tasks.tuned, "norm", by="sgd", lr=0.05, steps=150),
    "tuned_prompt": row(tasks.tuned, "prompt", lr=0.02, steps=400, task={"need": 0.75}),
}


def program(
    build: Callable[..., tasks.Task],
    of: tuple[Any, ...],
    task: dict[str, Any],
    recipe: dict[str, Any],
) -> Any:
    """Return the method of a row."""
    return healthy(lambda self: self.apply(build(self.seed, *of, **task), **recipe))


for _name, _row in TABLE.items():
    setattr(HealthyTable, _name, program(*_row))
