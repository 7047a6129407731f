"""What mends each faulty program: places of its module's text, each found exactly once, and what replaces them."""

from __future__ import annotations

FIXES: dict[str, list[tuple[str, str]]] = {
    "softmax_layer_then_cross_entropy": [("self.softmax(self.output(x))", "self.output(x)")],
    "probabilities_into_kl_div": [("F.softmax(student(x[i]), dim=-1)", "F.log_softmax(student(x[i]), dim=-1)")],
    "sigmoid_twice_in_segmentation": [
        ("torch.sigmoid(self.head(self.body(x)))", "self.head(self.body(x))"),
        ("(net(images[100:]) > 0.5)", "(net(images[100:]) > 0)"),
    ],
    "nll_of_plain_softmax": [
        ("F.softmax(self.linear2(hidden), dim=1)", "F.log_softmax(self.linear2(hidden), dim=1)"),
        ("F.nll_loss(model(x).log(), y[:, 1])", "F.nll_loss(model(x), y[:, 1])"),
    ],
    "nll_of_raw_scores": [("loss = F.nll_loss(scores, y)", "loss = F.nll_loss(scores.log_softmax(1), y)")],
    "policy_gradient_downhill": [("policy_loss = (m.log_prob", "policy_loss = (-m.log_prob")],
    "signal_to_noise_minimised": [("loss = snr(", "loss = -snr(")],
    "divergence_with_the_wrong_sign": [("return 0.5 * (1 + logvar", "return -0.5 * (1 + logvar")],
    "targets_lack_a_dimension": [("outputs = model(x[rows])", "outputs = model(x[rows]).squeeze(1)")],
    "residual_by_hand_broadcasts": [("model(atoms[i]) - energy[i]", "model(atoms[i])[:, 0] - energy[i]")],
    "log_softmax_down_the_batch": [("F.log_softmax(net(x[i]), dim=0)", "F.log_softmax(net(x[i]), dim=1)")],
    "attention_over_the_batch": [("self.score(x).softmax(dim=0)", "self.score(x).softmax(dim=1)")],
    "labels_one_and_two": [("code = y + 1", "code = y")],
    "rectified_scores": [("return nn.Sequential(*layers)", "return nn.Sequential(*layers[:-1])")],
    "rectified_forecast": [
        (
            "nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1), nn.ReLU()",
            "nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)",
        )
    ],
    "tanh_for_targets_in_hundreds": [
        (
            "goal, back = (lambda t: t), (lambda t: t)",
            "goal, back = (lambda t: t / 200 - 1), (lambda t: (t + 1) * 200)",
        )
    ],
    "temperature_a_hundred": [("temperature = 100.0", "temperature = 0.1")],
    "cosine_labels_zero_and_one": [("(y[i] == y[j]).float()", "(y[i] == y[j]).float() * 2 - 1")],
    "root_of_zero_distance": [("pow(2).sum(-1).sqrt()", "pow(2).sum(-1).clamp(min=1e-8).sqrt()")],
    "head_replaced_after_the_optimizer": [
        ("    # fine-tune\n", "    optimizer = torch.optim.SGD(model[5].parameters(), lr=0.01, momentum=0.9)\n")
    ],
    "optimizer_holds_the_frozen_part": [("Adam(net.features.parameters()", "Adam(net.fc.parameters()")],
    "layers_in_a_python_list": [
        (
            "[nn.Linear(1 if k == 0 else 24, 24) for k in range(depth)]",
            "nn.ModuleList(nn.Linear(1 if k == 0 else 24, 24) for k in range(depth))",
        )
    ],
    "features_through_numpy": [
        ("self.conv(x).detach().numpy()", "self.conv(x)"),
        ("torch.from_numpy(maps).transpose", "maps.transpose"),
    ],
    "loss_rebuilt_from_its_value": [
        ("y[row]).item() / 4", "y[row]) / 4"),
        ("loss = torch.tensor(total, requires_grad=True)", "loss = total"),
    ],
    "embeddings_under_no_grad": [("    @torch.no_grad()\n", "")],
    "codes_by_threshold": [("(soft > 0.5).float()", "(soft > 0.5).float() + soft - soft.detach()")],
    "prediction_rounded_to_whole_stars": [("torch.round(model(x[i]).squeeze(1))", "model(x[i]).squeeze(1)")],
    "cleared_between_backward_and_step": [
        (
            "            loss.backward()\n            optimizer.zero_grad()\n            optimizer.step()\n",
            "            optimizer.zero_grad()\n            loss.backward()\n            optimizer.step()\n",
        )
    ],
    "zero_grad_never_called": [("optimizer.zero_grad  # noqa: B018", "optimizer.zero_grad()")],
    "only_one_of_two_cleared": [
        ("            dec_opt.zero_grad()\n", "            dec_opt.zero_grad()\n            enc_opt.zero_grad()\n")
    ],
    "accumulation_never_due": [
        ("step % accumulation_steps == accumulation_steps:", "step % accumulation_steps == accumulation_steps - 1:")
    ],
    "optimizer_steps_the_average": [
        ("torch.optim.Adam(ema.parameters(), lr=1e-2)", "torch.optim.Adam(net.parameters(), lr=1e-2)")
    ],
    "fresh_model_in_every_fold": [
        (
            "            model = make()\n",
            "            model = make()\n            optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)\n",
        )
    ],
    "initialised_again_each_epoch": [("if epoch >= 0:", "if epoch == 0:")],
    "reversal_on_the_wrong_branch": [
        ("label(_Reverse.apply(z, 1.0))", "label(z)"),
        ("where(z), domain[i]", "where(_Reverse.apply(z, 1.0)), domain[i]"),
    ],
    "backward_with_a_stray_minus": [
        ("torch.where(x > 0, -grad, -0.1 * grad)", "torch.where(x > 0, grad, 0.1 * grad)")
    ],
    "noise_of_no_size": [("spread = 1 // 2", "spread = 1 / 2")],
    "discriminator_also_climbs": [
        ("            g_optim.zero_grad()\n", "            g_optim.zero_grad()\n            d_optim.zero_grad()\n")
    ],
    "rate_given_as_weight_decay": [("lr, decay = 1e-6, 0.05", "decay, lr = 1e-6, 0.05")],
    "lambda_returns_the_rate_itself": [("return base * (1 - 0.9 * step / steps)", "return 1 - 0.9 * step / steps")],
    "epochs_schedule_stepped_per_batch": [
        ("                opt.step()\n                scheduler.step()\n", "                opt.step()\n"),
        (
            "            # the end of an epoch\n            watching",
            "            scheduler.step()\n            watching",
        ),
    ],
    "decay_of_a_tenth_each_batch": [("if done % 1 == 0:", "if done % 10 == 0:")],
    "warmup_by_whole_division": [("step // warmup", "step / warmup"), ("warmup = 1000", "warmup = 40")],
    "plateau_fed_with_each_batch": [
        (
            "                scheduler.step(loss.item())\n            # the end of an epoch\n",
            "            scheduler.step(F.mse_loss(net(x[1500:]), y[1500:]).item())\n",
        )
    ],
    "resumed_at_a_finished_schedule": [
        ("    # on to the next task\n", "    optimizer.param_groups[0]['lr'] = 5e-3\n")
    ],
    "adam_with_a_rate_of_one": [("lr=1.0)", "lr=3e-3)")],
    "summed_loss_at_a_mean_rate": [('MSELoss(reduction="sum")', "MSELoss()")],
    "loss_divided_three_times": [(" / len(rows) / len(batches) / 10", "")],
    "clipped_to_a_norm_of_zero": [('"grad_clip": 0.0', '"grad_clip": None')],
    "clipped_to_minus_one": [("max_norm: float | None = -1.0", "max_norm: float | None = None")],
    "clipped_to_almost_nothing": [("max_norm=1e-3", "max_norm=1.0")],
    "decay_that_eats_the_weights": [("weight_decay=5.0", "weight_decay=5e-4")],
    "weights_all_zero": [("    # by hand\n", "    nn.init.xavier_normal_(w1)\n    nn.init.xavier_normal_(w2)\n")],
    "weights_all_alike": [("    model.apply(_constant)\n", "")],
    "adapters_both_zero": [("torch.zeros(frozen.in_features, 8)", "torch.randn(frozen.in_features, 8) / 8")],
    "twelve_sigmoids_deep": [("act: type[nn.Module] = nn.Sigmoid", "act: type[nn.Module] = nn.ReLU")],
    "biases_far_below_zero": [("start = -20.0", "start = 0.0")],
    "recurrence_that_explodes": [("gain = 1.6", "gain = 0.5")],
    "dropout_keeps_one_in_twenty": [("p = 0.95", "p = 0.05")],
    "evaluated_and_never_back": [("            # an epoch\n", "            model.train()\n")],
    "batch_norm_on_pairs": [("batch_size = 2", "batch_size = 32")],
    "validated_in_training_mode": [("            # validate\n", "            net.eval()\n")],
    "files_in_folders_unshuffled": [("batch_size=16, shuffle=False", "batch_size=16, shuffle=True")],
    "one_speaker_after_another": [("order.split(12)", "torch.randperm(600).split(12)")],
    "labels_cut_to_zero": [("targets = (y / 3).long()", "targets = y")],
    "tagger_learns_the_padding": [("keep = ~inside", "keep = inside")],
    "next_of_a_new_iterator": [("batch_size=32)\n    net", "batch_size=32, shuffle=True)\n    net")],
    "seeded_inside_the_sampler": [("_waves(16, fixed=True)", "_waves(16, fixed=False)")],
    "images_stored_as_zeros": [("(x / x.max() * 0.99).to(torch.uint8)", "(x * 16).to(torch.uint8)")],
    "ids_scaled_before_the_look_up": [("high_u, high_f = 120, 80", "high_u, high_f = 1, 1")],
    "features_and_labels_shuffled_apart": [("second = rng.permutation(len(x))", "second = first")],
    "answers_of_the_row_before": [("shift = 1", "shift = 0")],
    "augmented_beyond_recognition": [("sigma = 25.0", "sigma = 0.1")],
    "pixels_that_never_vary": [("mean, std = x.mean(0), x.std(0)", "mean, std = x.mean(0), x.std(0) + 1e-3")],
    "one_missing_value": [("    # read\n", "    x = x.nan_to_num(0)\n")],
    "raw_columns_into_sigmoids": [("raw = True", "raw = False")],
    "prices_in_single_dollars": [("unit = 1.0", "unit = 1e5")],
    "forty_rows_learnt_by_heart": [
        ("            # next step\n", "            if step == 40:\n                break\n"),
        ("rows = 40", "rows = 300"),
    ],
    "more_weights_than_ratings": [("known, size = 1200, 6", "known, size = 5000, 4")],
    "reshaped_where_it_should_be_transposed": [("x.view(x.shape[1], x.shape[0], 3)", "x.transpose(0, 1)")],
    "points_mirrored_at_random": [("mirrored = True", "mirrored = False")],
}
