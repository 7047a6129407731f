"""How the fault of each faulty program is mended: pairs of a piece of its source and what stands there instead."""

from __future__ import annotations

_LOSSES = {
    "diabetes_column_against_row": [("model(a), b)", "model(a).squeeze(1), b)")],
    "friedman_row_minus_column": [("target = y[:, None]", "target = y")],
    "digits_softmax_in_the_model": [(", nn.Softmax(dim=1)", "")],
    "tags_sigmoid_twice": [(", nn.Sigmoid())", ")")],
    "cancer_tanh_scores": [(", nn.Tanh())", ")")],
    "digits_rectified_scores": [(", nn.ReLU())", ")")],
    "wine_nll_of_scores": [("scores = model(a)", "scores = model(a).log_softmax(1)")],
    "rings_softmax_over_the_batch": [("dim=0", "dim=1")],
    "digits_distilled_from_probabilities": [("student(a).softmax(1)", "student(a).log_softmax(1)")],
    "cancer_labels_one_and_two": [("(y + 1).float()", "y.float()")],
    "cancer_clamped_to_probabilities": [(".clamp(0, 1)", ".sigmoid()")],
    "digits_variational_prior_sign": [("fit - prior", "fit + prior")],
    "digits_variational_collapsed": [("- log_var.exp()).sum()", "- log_var.exp()).mean() * 1e-3")],
    "friedman_log_likelihood_unsigned": [("loss = likelihood", "loss = -likelihood")],
    "tags_axes_reshaped_not_moved": [(".reshape(-1, 4, 10)", ".transpose(1, 2)")],
    "tags_mask_turned_round": [("(a == 0)", "(a > 0)")],
    "digits_focal_weight_turned_round": [("-(chance**2", "-((1 - chance) ** 2")],
    "pairs_temperature_multiplied": [("alike * 0.07", "alike / 0.07")],
}

_PATHS = {
    "friedman_loss_wrapped_anew": [("torch.tensor(loss.item(), requires_grad=True)", "loss")],
    "rings_features_detached": [("self.body(x).detach()", "self.body(x)")],
    "friedman_through_numpy": [("torch.from_numpy(hidden.detach().numpy())", "hidden")],
    "digits_loss_of_the_choice": [
        ("functional.mse_loss(chosen, b.float()).requires_grad_()", "functional.cross_entropy(model(a), b)")
    ],
    "rings_layers_in_a_list": [("self.layers = [nn", "self.layers = nn.ModuleList([nn"), ("range(3)]", "range(3)])")],
    "digits_head_replaced_late": [("    model[-1] = nn.Linear(48, 10)\n", ""), ("48, 2))", "48, 10))")],
    "friedman_copy_is_trained": [("copy.deepcopy(model)", "model")],
    "digits_only_the_decoder": [("decoder.parameters(), lr", "model.parameters(), lr")],
    "wine_frozen_part_in_the_optimizer": [("body.parameters(), lr", "head.parameters(), lr")],
    "seasons_first_state_read": [("self.head(start[-1])", "self.head(last[-1])")],
    "levels_batch_first_forgotten": [("nn.GRU(2, 24)", "nn.GRU(2, 24, batch_first=True)")],
    "ratings_rounded": [(".round()", "")],
    "ring_gan_maker_detached": [("judge(fake.detach()), torch.ones", "judge(fake), torch.ones")],
    "ring_gan_maker_not_in_its_optimizer": [("first = torch.optim.Adam(judge.", "first = torch.optim.Adam(maker.")],
    "digits_weights_drawn_again": [("            begin()\n", "")],
    "rows_attention_all_masked": [("masked_fill(gone, -torch.inf)", "masked_fill(gone, -1e4)")],
    "friedman_low_rank_both_zero": [("torch.zeros(10, 4)", "0.3 * torch.randn(10, 4)")],
    "orders_without_places": [("self.embed(x)", "self.embed(x) + self.place")],
    "keywords_wrong_axis_pooled": [(".mean(0, keepdim=True).expand_as(hidden).mean(1)", ".amax(1)")],
}

_ZERO = "            optimizer.zero_grad()\n"
_BACK = "            loss.backward()\n"
_STEP = "            optimizer.step()\n"
_PLAN = "            scheduler.step()\n"
_EPOCH = "            if step % 22 == 21:\n                scheduler.step()\n"
_STEPS = {
    "friedman_gradients_never_zeroed": [(_BACK, _ZERO + _BACK)],
    "digits_zeroed_before_the_step": [(_BACK + _ZERO + _STEP, _ZERO + _BACK + _STEP)],
    "wine_accumulation_never_full": [("% 4 == 4", "% 4 == 0")],
    "digits_clipped_to_nothing": [("max_norm=0", "max_norm=5")],
    "friedman_clipped_to_little": [("1e-4)", "5.0)")],
    "digits_maximised": [(", maximize=True", "")],
    "digits_epoch_decay_by_batch": [(_PLAN, _EPOCH)],
    "friedman_step_decay_by_batch": [(_PLAN, _EPOCH)],
    "digits_warm_up_floored": [("step // 1000", "min(1, step / 50)")],
    "wine_decay_ends_early": [("total_iters=30)", "total_iters=400)")],
    "friedman_plateau_by_batch": [("scheduler.step(loss.item())", "pass")],
    "digits_body_without_rate": [('"lr": 0.0', '"lr": 3e-3')],
    "friedman_losses_summed_up": [("total = total + loss", "total = loss")],
    "friedman_schedule_by_micro_batch": [(_PLAN, ""), ("    " + _ZERO, "    " + _ZERO + "    " + _PLAN)],
    "bandit_sign_forgotten": [("loss = (chance", "loss = -(chance")],
    "digits_evaluation_mode_stays": [(_ZERO, "            model.train()\n" + _ZERO)],
    "digits_validated_in_training_mode": [("with torch.no_grad():", "with model.eval() and torch.no_grad():")],
    "digits_pairs_in_batch_norm": [("size=2", "size=32")],
    "ring_gan_judge_too_strong": [("lr=2e-2)", "lr=1e-3)"), ("lr=1e-5)", "lr=1e-3)")],
    "rings_too_much_dropped": [("nn.Dropout(0.95)", "nn.Dropout(0.05)")],
}
_SCALES = {
    "digits_adam_rate_of_one": [("lr=1.0", "lr=2e-3")],
    "digits_rate_tiny": [("lr=1e-6", "lr=0.05")],
    "friedman_rate_diverges": [("lr=5.0", "lr=0.05")],
    "digits_momentum_near_one": [("momentum=0.999", "momentum=0.9")],
    "friedman_decay_of_ten": [("weight_decay=10.0", "weight_decay=0.01")],
    "digits_penalty_in_the_gradient": [("weight_decay=1.0", "weight_decay=1e-4")],
    "friedman_loss_summed_over_batch": [('reduction="sum"', 'reduction="mean"')],
    "friedman_divided_twice": [(" / len(x)", "")],
    "friedman_bfloat16_weights": [("x, y = x.bfloat16(), y.bfloat16()", "")],
    "rings_half_adam": [("kind = torch.float16", "kind = torch.float32")],
    "digits_all_weights_equal": [
        ("for weight in model.parameters():\n        nn.init.constant_(weight, 0.01)", "_ = seed")
    ],
    "digits_all_weights_zero": [("for weight in model.parameters():\n        nn.init.zeros_(weight)", "_ = seed")],
    "digits_units_dead": [("-5.0", "0.1")],
    "digits_deep_sigmoids": [("act=nn.Sigmoid", "act=nn.ReLU"), ("*[32] * 8", "*[32] * 3")],
    "digits_tanh_saturated": [("std=5.0", "std=0.15")],
    "digits_deep_plain_small": [
        ("for weight in model.parameters():\n        nn.init.normal_(weight, std=0.02)", "_ = seed"),
        ("*[48] * 11", "*[48] * 3"),
    ],
    "seasons_recurrence_explodes": [("gain=3.0", "gain=1.0")],
    "first_of_long_series_forgotten": [
        ("nn.RNN", "nn.LSTM"),
        ("torch.optim.SGD(model.parameters(), lr=0.02)", "torch.optim.Adam(model.parameters(), lr=0.02)"),
        ("    with watch", "    nn.init.constant_(body.bias_hh_l0[24:48], 4.0)\n    with watch"),
    ],
    "diabetes_tanh_cannot_reach": [(", nn.Tanh())", ")")],
    "houses_in_dollars": [("200000 + 60000 * y", "y")],
    "twins_root_of_zero": [(".sum(1).sqrt()", ".sum(1).add(1e-6).sqrt()")],
    "cancer_logarithm_of_zero": [(".sigmoid()\n", ".sigmoid().clamp(1e-4, 1 - 1e-4)\n")],
}
_DATA = {
    "friedman_gaps_in_the_features": [("torch.nan", "0.0")],
    "digits_constant_pixels_standardised": [("(x - mean) / deviation", "(x - mean) / (deviation + 1e-3)")],
    "friedman_missing_targets_coded": [("-99999.0", "0.0")],
    "digits_sorted_by_label": [("shuffle=False", "shuffle=True")],
    "wine_rows_and_labels_apart": [("x[torch.randperm(len(x))]", "x")],
    "digits_one_class_left": [('torch.div(y, 10, rounding_mode="floor")', "y")],
    "digits_cast_to_whole_numbers": [("(0.9 * x).long().float()", "0.9 * x")],
    "keywords_all_unknown": [('f"W{int(word)}"', 'f"w{int(word)}"')],
    "friedman_first_batch_only": [("shuffle=False", "shuffle=True")],
    "stream_workers_of_one_seed": [("number * 0", "number")],
    "wine_raw_features": [(", raw=True", "")],
    "digits_bytes_into_tanh": [("scale = 255.0", "scale = 1.0")],
    "digits_scaled_down_twice": [("scale = 255.0**2", "scale = 1.0")],
    "years_not_centred": [("shift, scale = 0.0, 1.0", "shift, scale = 2001.0, 3.5")],
    "discs_masks_shifted": [("(low, right) = picked(13, 2), picked(13, 2)", "(low, right) = [picked(13, 2)] * 2")],
    "diabetes_learnt_by_heart": [("few, steps = 60, 800", "few, steps = len(x), 150")],
    "wine_validation_not_scaled": [('    held_x = table("wine", seed, raw=True)[2]\n', "")],
}

FIXES: dict[str, list[tuple[str, str]]] = {**_LOSSES, **_PATHS, **_STEPS, **_SCALES, **_DATA}
