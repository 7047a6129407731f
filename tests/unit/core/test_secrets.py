"""Secrets on a command line: found by their option or their shape, and nothing else is hidden."""

from __future__ import annotations

import pytest

from holdfast.core.secrets import without_secrets

S = "S3cr"
KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize(
    "words",
    [
        f"--api-key={S}", f"--token {S}", f"--password {S} --lr 1", f"--hf_token {S}", f"HF_TOKEN={S}",
        f"WANDB_API_KEY={S}", f"--wandb-key {S}", f"--key {KEY}", f"key={KEY}", f"--aws_secret_access_key {S}",
        f"trainer.logger.api_key={S}", f"+a.b.password={S}", f"https://user:{S}@host/x", f"postgresql://u:{S}@h:1/db",
        f"https://x/?token={S}&a=1", f"https://hooks.slack.com/services/T0/B0/{S}", f"-c login(token='{S}')",
        f'--cfg {{"api_key":"{S}"}}', f"--x eyJhbGciOiJI.eyJzdWIiOiIx.{S}", f"a hf_{KEY}", f"a sk-ant-api03-{KEY}",
        f"a sk-{KEY}", f"a ghp_{KEY}", "a AKIA" + "A1" * 8 + "", f"a glpat-{KEY}", f"a github_pat_{KEY}",
    ],
)  # fmt: skip
def test_a_secret_is_hidden(words):
    """By the name of its option, whoever writes it, by its shape, or within an address."""
    found = " ".join(without_secrets(words.split(" ")))
    assert "***" in found
    assert not any(secret in found for secret in (S, KEY, "A1A1"))
    assert found.startswith(words[:2])


def test_a_secret_in_a_command_within_a_word_is_hidden():
    """As `sh -c` is given it."""
    assert (
        without_secrets(["sh", "-c", f"python a.py --hf_token {S} --lr 1"])[2] == "python a.py --hf_token *** --lr 1"
    )


def test_a_value_with_blanks_is_hidden_whole():
    """A word of the command line is one value, also where it holds blanks."""
    assert without_secrets([f"--password=my {S} pass", "Authorization: Bearer " + S, "--lr", "1"]) == [
        "--password=***", "Authorization: Bearer ***", "--lr", "1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        "--max-tokens 100", "--pad_token <pad>", "--eos-token </s>", "--tokenizer bpe", "--key_dim 64",
        "--sort-key loss",
        "--label_key=target", "--passes 3", "--author me", "s3://bucket/key/path", "--token_dim=5", "--num_tokens=3",
        "train.py --data /a/b:c@d", "--image-token <image>", "--monkey 3", "--lr 0.1 --compass north",
        "--use-auth-token --lr 1",
    ],
)  # fmt: skip
def test_what_is_no_secret_is_shown(words):
    """Options of vocabularies, of layers and of columns have names that are nearly alike."""
    assert without_secrets(words.split(" ")) == words.split(" ")


@pytest.mark.parametrize("piece", ["a-", "token=", "://", "a:", "key", "eyJ", "sk-", "password ", "bearer ", "api_"])
def test_a_long_word_takes_no_time(piece):
    """A word of the longest that Linux passes on is gone through once, not once for each of its characters."""
    without_secrets([piece * (131_000 // len(piece))] * 50)
