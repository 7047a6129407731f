"""Failures by shapes and dtypes: layers, losses, indexing and joining that do not fit what they are given."""

from __future__ import annotations

from benchmarks.failures import failure


@failure("H965", author="G")
def classifier_after_flatten_for_another_resolution() -> None:
    import torch
    from torch import nn

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16 * 16, 10)
    )
    net(torch.randn(2, 3, 64, 64))


@failure("H965", author="G")
def forgot_to_flatten_the_image() -> None:
    import torch

    class Perceptron(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(784, 32)
            self.last = torch.nn.Linear(32, 10)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.first(image)))

    Perceptron()(torch.randn(16, 1, 28, 28))


@failure("H965", author="G")
def projection_by_hand_transposed() -> None:
    import torch

    hidden, weight = torch.randn(4, 12), torch.randn(8, 12)
    hidden @ weight


@failure("H965", author="G")
def attention_scores_without_transpose() -> None:
    import torch

    query, key = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    torch.bmm(query, key)


@failure("H965", author="G")
def matrix_times_vector_of_another_length() -> None:
    import torch

    torch.mv(torch.randn(3, 4), torch.randn(5))


@failure("H965", author="G")
def decoder_fed_with_the_wrong_latent() -> None:
    import torch

    class Autoencoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = torch.nn.Linear(20, 6)
            self.decode = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 20))

    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model.decode(model.encode(torch.randn(4, 20))).sum().backward()
        optimizer.step()


@failure("H966", author="G")
def gray_digits_into_a_colour_net() -> None:
    import torch

    torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU())(torch.randn(8, 1, 28, 28))


@failure("H966", author="G")
def images_with_channels_last() -> None:
    import numpy as np
    import torch

    photo = np.zeros((4, 32, 32, 3), dtype=np.float32)
    torch.nn.Conv2d(3, 8, 5)(torch.from_numpy(photo))


@failure("H966", author="G")
def audio_features_with_time_first() -> None:
    import torch

    torch.nn.Conv1d(80, 32, kernel_size=3, padding=1)(torch.randn(2, 200, 80))


@failure("H966", author="G")
def skip_connection_doubles_the_channels() -> None:
    import torch

    up, join = torch.nn.ConvTranspose2d(16, 8, 2, stride=2), torch.nn.Conv2d(8, 8, 3)
    deep, skip = torch.randn(1, 16, 8, 8), torch.randn(1, 8, 16, 16)
    join(torch.cat([up(deep), skip], dim=1))


@failure("H966", author="G")
def transposed_convolution_of_flat_noise() -> None:
    import torch

    torch.nn.ConvTranspose2d(100, 64, 4)(torch.randn(2, 128, 1, 1))


@failure("H967", author="G")
def tiny_crop_in_a_deep_net() -> None:
    import torch
    from torch import nn

    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Conv2d(3, 3, 3, stride=2), nn.ReLU()]
    nn.Sequential(*layers)(torch.randn(1, 3, 32, 32))


@failure("H967", author="G")
def pooling_until_nothing_is_left() -> None:
    import torch

    image = torch.randn(1, 4, 12, 12)
    for _ in range(4):
        image = torch.nn.functional.max_pool2d(image, 2)


@failure("H967", author="G")
def word_convolution_on_a_short_sentence() -> None:
    import torch

    class Sentences(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.widths = torch.nn.ModuleList(torch.nn.Conv1d(8, 4, width) for width in (3, 4, 5))

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return torch.cat([each(words).amax(2) for each in self.widths], 1)

    Sentences()(torch.randn(2, 8, 4))


@failure("H968", author="G")
def residual_without_projection() -> None:
    import torch

    block = torch.nn.Conv2d(16, 16, 3, stride=2, padding=1)
    image = torch.randn(1, 16, 9, 9)
    image + block(image)


@failure("H968", author="G")
def bias_for_the_wrong_axis() -> None:
    import torch

    torch.randn(32, 10).add_(torch.zeros(32))


@failure("H968", author="G")
def concatenate_an_odd_feature_map() -> None:
    import torch

    skip = torch.randn(1, 8, 25, 25)
    up = torch.nn.functional.interpolate(torch.randn(1, 8, 12, 12), scale_factor=2)
    torch.cat([skip, up], dim=1)


@failure("H968", author="G")
def collecting_predictions_of_the_last_small_batch() -> None:
    import torch

    results = [torch.zeros(3, 8), torch.zeros(3, 5)]
    torch.cat(results, dim=0)


@failure("H968", author="G")
def positional_table_too_short() -> None:
    import torch

    class Positions(torch.nn.Module):
        def __init__(self, most: int) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(1, most, 8))

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return words + self.table

    Positions(64)(torch.zeros(2, 80, 8))


@failure("H968", author="G")
def mask_expanded_over_heads() -> None:
    import torch

    torch.ones(2, 7).expand(2, 4, 9)


@failure("H968", author="G")
def moving_average_of_two_models_of_different_width() -> None:
    import torch

    teacher, student = torch.nn.Linear(8, 4), torch.nn.Linear(8, 6)
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 0.01)


@failure("H968", author="G")
def numpy_mean_subtracted_along_the_wrong_axis() -> None:
    import numpy as np

    clip = np.zeros((10, 4))
    clip - clip.mean(axis=1)


@failure("H968", author="G")
def copy_weights_by_hand() -> None:
    import torch

    layer, old = torch.nn.Linear(5, 5), torch.zeros(5, 6)
    with torch.no_grad():
        layer.weight.copy_(old)


@failure("H968", author="G")
def accuracy_of_a_padded_batch() -> None:
    import torch

    prediction, label = torch.zeros(8, 10).argmax(1), torch.zeros(6, dtype=torch.long)
    print((prediction == label).float().mean())


@failure("H969", author="G")
def view_with_the_wrong_batch() -> None:
    import torch

    torch.randn(5, 3, 8, 8).view(4, -1, 7)


@failure("H969", author="G")
def heads_that_do_not_divide_the_width() -> None:
    import torch

    class Heads(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            batch, length, width = hidden.shape
            return hidden.reshape(batch, length, 3, width // 3)

    Heads()(torch.randn(2, 5, 16))


@failure("H969", author="G")
def view_after_permute() -> None:
    import torch

    torch.randn(2, 3, 4).permute(0, 2, 1).view(2, 12)


@failure("H969", author="G")
def numpy_image_of_another_size() -> None:
    import numpy as np

    np.frombuffer(bytes(3 * 100), dtype=np.uint8).reshape(28, 28)


@failure("H969", author="G")
def unflatten_of_an_uneven_dimension() -> None:
    import torch

    torch.randn(2, 10).unflatten(1, (3, 4))


@failure("H971", author="G")
def float_labels_for_cross_entropy() -> None:
    import torch

    torch.nn.functional.nll_loss(torch.zeros(4, 3).log_softmax(1), torch.tensor([0.0, 1.0, 2.0, 0.0]))


@failure("H971", author="G")
def double_features_from_numpy() -> None:
    import numpy as np
    import torch

    torch.nn.Linear(3, 1)(torch.from_numpy(np.random.default_rng(0).normal(size=(5, 3))))


@failure("H971", author="G")
def byte_image_into_a_convolution() -> None:
    import torch

    torch.nn.Conv2d(3, 4, 3)(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))


@failure("H971", author="G")
def half_model_with_float_data() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Conv1d(2, 2, 3), torch.nn.Flatten()).half()
    model(torch.randn(1, 2, 8))


@failure("H971", author="G")
def float_tokens_in_an_embedding() -> None:
    import torch

    torch.nn.Embedding(10, 4)(torch.tensor([1.0, 2.0]))


@failure("H971", author="G")
def gather_by_int32() -> None:
    import torch

    torch.randn(3, 4).gather(1, torch.zeros(3, 1))


@failure("H971", author="G")
def fancy_index_by_floats() -> None:
    import torch

    order = torch.rand(6) * 6
    torch.randn(6, 2)[order]


@failure("H971", author="G")
def recurrent_net_on_double() -> None:
    import torch

    torch.nn.LSTM(4, 8, batch_first=True)(torch.zeros(2, 3, 4, dtype=torch.float64))


@failure("H1279", author="G")
def add_in_place_to_integers() -> None:
    import torch

    counts = torch.zeros(3, dtype=torch.long)
    counts += torch.rand(3)


@failure("H973", author="G")
def binary_logits_with_a_last_dimension() -> None:
    import torch

    torch.nn.BCEWithLogitsLoss()(torch.randn(8, 1), torch.ones(8))


@failure("H973", author="G")
def binary_probabilities_with_two_columns() -> None:
    import torch

    torch.nn.BCELoss()(torch.rand(8, 2), torch.ones(8, 1))


@failure("H974", author="G")
def last_batch_of_one_with_batch_norm() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    for (batch,) in DataLoader(TensorDataset(torch.randn(9, 4)), batch_size=4):
        net(batch).mean().backward()


@failure("H974", author="G")
def pooled_branch_with_batch_size_one() -> None:
    import torch
    from torch import nn

    branch = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4))
    branch(torch.randn(1, 8, 16, 16))


@failure("H974", author="G")
def instance_norm_on_a_single_pixel() -> None:
    import torch

    torch.nn.InstanceNorm2d(4)(torch.randn(2, 4, 1, 1))


@failure("H1310", author="G")
def softmax_over_a_dimension_that_is_not_there() -> None:
    import torch

    torch.softmax(torch.randn(10), dim=1)


@failure("H1310", author="G")
def too_many_indices_after_squeeze() -> None:
    import torch

    logits = torch.randn(1, 10).squeeze()
    logits[:, 3]


@failure("H1310", author="G")
def concatenate_a_batch_and_a_sample() -> None:
    import torch

    torch.cat([torch.zeros(2, 3), torch.zeros(3)])


@failure("H1310", author="G")
def numpy_axis_of_a_mono_file() -> None:
    import numpy as np

    np.zeros(16000).mean(axis=1)


@failure("H1310", author="G")
def permute_with_a_dimension_missing() -> None:
    import torch

    torch.randn(2, 3, 8, 8).permute(0, 2, 1)


@failure("H1310", author="G")
def numpy_image_without_channels() -> None:
    import numpy as np

    gray = np.zeros((32, 32))
    gray[:, :, 0]


@failure("H1311", author="G")
def flat_vector_into_a_convolution() -> None:
    import torch

    torch.nn.Conv2d(1, 4, 3)(torch.randn(16, 784))


@failure("H1311", author="G")
def batch_norm_2d_after_a_linear_layer() -> None:
    import torch

    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm2d(8))(torch.randn(3, 4))


@failure("H1311", author="G")
def recurrent_net_on_images() -> None:
    import torch

    torch.nn.GRU(8, 4)(torch.randn(2, 3, 8, 8))


@failure("H1311", author="G")
def hidden_state_of_a_batch_for_one_sequence() -> None:
    import torch

    torch.nn.LSTM(8, 4)(torch.randn(5, 8), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)))


@failure("H1311", author="G")
def resize_without_a_batch() -> None:
    import torch

    torch.nn.functional.interpolate(torch.randn(3, 8, 8), size=(16, 16), mode="bilinear")


@failure("H1311", author="G")
def pool_a_sentence_embedding() -> None:
    import torch

    torch.nn.MaxPool2d(2)(torch.randn(10))


@failure("H1312", author="G")
def recurrent_net_built_for_other_features() -> None:
    import torch

    class Tagger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = torch.nn.Embedding(50, 16), torch.nn.LSTM(32, 8, batch_first=True)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.lstm(self.embed(words))[0]

    Tagger()(torch.zeros(2, 5, dtype=torch.long))


@failure("H1312", author="G")
def layer_norm_over_the_wrong_axis() -> None:
    import torch

    torch.nn.LayerNorm(64)(torch.randn(2, 64, 10))


@failure("H1312", author="G")
def batch_norm_of_another_width() -> None:
    import torch

    torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm2d(3))(torch.randn(1, 3, 8, 8))


@failure("H1312", author="G")
def hidden_state_of_the_previous_batch() -> None:
    import torch

    lstm, state = torch.nn.LSTM(4, 6), None
    for batch_size in (8, 8, 3):
        _, state = lstm(torch.randn(5, batch_size, 4), state)


@failure("H1312", author="G")
def heads_do_not_divide_embed_dim() -> None:
    import torch

    torch.nn.TransformerEncoderLayer(d_model=100, nhead=8)


@failure("H1312", author="G")
def attention_on_another_embedding() -> None:
    import torch

    words = torch.randn(2, 5, 24)
    torch.nn.MultiheadAttention(32, 4, batch_first=True)(words, words, words)


@failure("H1312", author="G")
def group_norm_of_uneven_groups() -> None:
    import torch

    torch.nn.Sequential(torch.nn.Conv2d(3, 10, 1), torch.nn.GroupNorm(4, 10))(torch.randn(1, 3, 4, 4))


@failure("H1312", author="G")
def grouped_convolution_of_uneven_channels() -> None:
    import torch

    torch.nn.Conv2d(10, 20, 3, groups=3)


@failure("H1313", author="G")
def batch_dimension_folded_into_time() -> None:
    import torch

    torch.nn.functional.cross_entropy(torch.randn(4, 7, 10).view(-1, 10), torch.zeros(4, dtype=torch.long))


@failure("H1313", author="G")
def classes_in_the_last_dimension() -> None:
    import torch

    torch.nn.CrossEntropyLoss()(torch.randn(4, 7, 10), torch.zeros(4, 7, dtype=torch.long))


@failure("H1313", author="G")
def one_hot_integers_as_target() -> None:
    import torch

    torch.nn.functional.nll_loss(torch.randn(4, 3), torch.zeros(4, 3, dtype=torch.long))


@failure("H1313", author="G")
def mask_with_a_channel_dimension() -> None:
    import torch

    torch.nn.CrossEntropyLoss()(torch.randn(2, 5, 8, 8), torch.zeros(2, 1, 8, 8, dtype=torch.long))


@failure("H1313", author="G")
def labels_of_the_whole_batch_for_the_kept_samples() -> None:
    import torch

    head, labels = torch.nn.Linear(6, 4), torch.zeros(8, dtype=torch.long)
    for batch in torch.randn(3, 8, 6):
        kept = batch[:5]
        torch.nn.functional.cross_entropy(head(kept), labels)


@failure("H1314", author="G")
def causal_mask_of_the_longest_sequence() -> None:
    import torch

    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    words = torch.randn(3, 6, 8)
    layer(words, words, words, attn_mask=torch.nn.Transformer.generate_square_subsequent_mask(10))


@failure("H1314", author="G")
def padding_mask_transposed() -> None:
    import torch

    encoder = torch.nn.TransformerEncoderLayer(8, 2, dropout=0.0)
    encoder(torch.randn(6, 3, 8), src_key_padding_mask=torch.zeros(6, 3, dtype=torch.bool))


@failure("H1314", author="G")
def boolean_mask_of_a_trimmed_batch() -> None:
    import torch

    keep = torch.ones(8, dtype=torch.bool)
    torch.randn(6, 4)[keep]


@failure("H1314", author="G")
def assignment_of_too_many_rows() -> None:
    import torch

    memory = torch.zeros(10, 4)
    memory[torch.tensor([1, 2, 3])] = torch.ones(2, 4)


@failure("H1314", author="G")
def numpy_mask_of_another_length() -> None:
    import numpy as np

    scores, keep = np.zeros(10), np.ones(8, dtype=bool)
    scores[keep]


@failure("H1314", author="G")
def write_a_longer_clip_into_a_buffer() -> None:
    import numpy as np

    buffer = np.zeros((2, 100))
    buffer[0] = np.ones(120)


@failure("H1315", author="G")
def einsum_with_a_missing_letter() -> None:
    import torch

    torch.einsum("bid,bjd->bij", torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5))


@failure("H1315", author="G")
def einsum_of_different_sizes() -> None:
    import torch

    torch.einsum("bhid,bhjd->bhij", torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 16))


@failure("H1272", author="G")
def mean_of_integer_rewards() -> None:
    import torch

    rewards = torch.tensor([1, 0, 2])
    print(rewards.mean())


@failure("H1272", author="G")
def softmax_of_integer_scores() -> None:
    import torch

    torch.softmax(torch.tensor([[1, 2], [3, 4]]), dim=1)


@failure("H1316", author="G")
def subtract_boolean_masks() -> None:
    import torch

    torch.tensor([True, False]) - torch.tensor([True, True])


@failure("H1317", author="G")
def reflect_more_than_there_is() -> None:
    import torch

    torch.stft(torch.randn(200), n_fft=512, window=torch.hann_window(512), return_complex=True)


@failure("H1317", author="G")
def packed_sequence_with_an_empty_one() -> None:
    import torch
    from torch.nn.utils.rnn import pack_padded_sequence

    pack_padded_sequence(torch.randn(3, 5, 4), torch.tensor([5, 2, 0]), batch_first=True)


@failure("H1317", author="G")
def packed_sequence_not_sorted() -> None:
    import torch
    from torch.nn.utils.rnn import pack_padded_sequence

    pack_padded_sequence(torch.randn(5, 3, 4), [2, 5, 3])


@failure("H1317", author="G")
def speech_targets_longer_than_given() -> None:
    import torch

    log_probabilities = torch.randn(20, 2, 5).log_softmax(2)
    torch.nn.CTCLoss()(
        log_probabilities, torch.ones(2, 6, dtype=torch.long), torch.tensor([20, 20]), torch.tensor([6, 9])
    )


@failure("H1317", author="G")
def split_into_sizes_that_do_not_add_up() -> None:
    import torch

    torch.randn(8, 30).split([10, 10, 9], dim=1)
