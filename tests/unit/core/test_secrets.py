"""Secrets on a command line: found by their option or their shape, and nothing else is hidden."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from holdfast.core.secrets import without_secrets

S = "S3cr"
KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize(
    "words",
    [
        f"--api-key={S}",
        f"--token {S}",
        f"--password {S} --lr 1",
        f"--hf_token {S}",
        f"HF_TOKEN={S}",
        f"WANDB_API_KEY={S}",
        f"--wandb-key {S}",
        f"--key {KEY}",
        f"key={KEY}",
        f"--aws_secret_access_key {S}",
        f"trainer.logger.api_key={S}",
        f"+a.b.password={S}",
        f"https://user:{S}@host/x",
        f"postgresql://u:{S}@h:1/db",
        f"https://x/?token={S}&a=1",
        f"https://hooks.slack.com/services/T0/B0/{S}",
        f"-c login(token='{S}')",
        f'--cfg {{"api_key":"{S}"}}',
        f"--x eyJhbGciOiJI.eyJzdWIiOiIx.{S}",
        f"a hf_{KEY}",
        f"a sk-ant-api03-{KEY}",
        f"--token -{S}",
        f"--hf_token -{KEY}",
        f"https://u:p/{S}@x@host:1/a",
        f"db://u:p@{S}/x@h",
        f"--token --{KEY}",
        f"a sk-{KEY}",
        f"a ghp_{KEY}",
        "a AKIA" + "A1" * 8 + "",
        f"a glpat-{KEY}",
        f"a github_pat_{KEY}",
    ],
)
def test_a_secret_is_hidden(words):
    """By the name of its option, whoever writes it, by its shape, or within an address."""
    found = " ".join(without_secrets(words.split(" ")))
    assert "***" in found
    assert not any(secret in found for secret in (S, KEY, "A1A1"))
    assert found.startswith(words[:2])


def test_a_secret_in_a_command_within_a_word_is_hidden():
    """As `sh -c` is given it."""
    assert (
        without_secrets(["sh", "-c", f"python a.py --hf_token {S} --lr 1"])[2]
        == "python a.py --hf_token *** --lr 1"
    )


@pytest.mark.parametrize(
    "words",
    [
        "--password 'my S3cr pass' --lr 1",
        'a.py --password="my S3cr pass" --lr 1',
        "--token -S3cr --lr 1",
        "ssh h 'a.py --token \"a S3cr b\" --lr 1'",
        "login(token='my S3cr pass', --lr)",
        "curl db://u:p/S3cr@x@h:1/x http://h:80/@a --lr",
    ],
)
def test_a_quoted_value_in_a_command_within_a_word_is_hidden_whole(words):
    """With its blanks, and what follows is shown."""
    _, _, hidden = without_secrets(["bash", "-c", words])
    assert ("***" in hidden, "--lr" in hidden) == (True, True)
    assert not any(part in hidden for part in ("S3cr", "my", "pass'", 'pass"', "-S"))


NAMES = some.from_regex(r"[a-z][a-z0-9]{0,9}([-_.][a-z0-9]{1,9}){0,2}", fullmatch=True)
OPTIONS = some.one_of(
    some.builds("--{}".format, NAMES),
    some.builds("--{}={}".format, NAMES, some.floats()),
    some.from_regex(r"-[a-zA-Z]|-[a-z][a-z_]{0,8}|-[0-9]", fullmatch=True),
)


@given(some.lists(OPTIONS, max_size=5), some.sampled_from(["--use-auth-token", "--ask-password"]))
def test_no_ordinary_option_is_hidden(words, flag):
    """Neither after each other nor after a flag that is called like a secret, nor in the word of
    a shell.
    """
    words = [
        word for word in words if without_secrets([word, "x"])[1] == "x" and word.startswith("-")
    ]
    words = [
        "train.py",
        *words,
        flag,
        *words,
        "--url",
        "http://h.org:8080/a@b",
        "--out",
        "s3://b/c:d@e",
    ]
    assert without_secrets(words) == words
    command = f"{' '.join(words)} {flag} && {' '.join(words)}"
    assert without_secrets(["sh", "-c", command])[2] == command


def test_a_value_with_blanks_is_hidden_whole():
    """A word of the command line is one value, also where it holds blanks."""
    assert without_secrets(
        [f"--password=my {S} pass", "Authorization: Bearer " + S, "--lr", "1"]
    ) == [
        "--password=***",
        "Authorization: Bearer ***",
        "--lr",
        "1",
    ]


# Command lines with the secret S, word by word; a word may hold blanks.
SECRET: list[list[str]] = [
    # headers
    ["--header", f"Authorization: Basic {S}"],
    ["-H", f"Authorization: Bearer {S}"],
    ["-H", f"authorization:Basic {S}"],
    [f"--header=Authorization: Basic {S}"],
    ["--header", f"Authorization: token {S}"],
    ["-H", f"Proxy-Authorization: Digest {S}"],
    ["-H", f"Cookie: session={S}; user=me"],
    ["-H", f"X-Api-Key: {S}"],
    ["-H", f"PRIVATE-TOKEN: {S}"],
    ["sh", "-c", f"curl -H 'Authorization: Basic {S}' http://host"],
    ["--headers", f'{{"Authorization": "Basic {S}"}}'],
    # options
    ["--key", S],
    [f"--key={S}"],
    ["-k", S],
    ["-p", S],
    [f"-p{S}"],
    ["--pass", S],
    ["--pw", S],
    ["--auth", S],
    ["--api-key", S],
    [f"--apikey={S}"],
    ["--apiKey", S],
    ["--token", S],
    ["--auth-token", S],
    [f"--password={S}"],
    ["--db-pass", S],
    ["--signing-key", S],
    ["--license-key", S],
    ["--client-secret", S],
    ["--jwt", S],
    ["--otp", S],
    ["--wandb_key", S],
    ["--neptune_api_token", S],
    ["--key", f"ab/{S}/cD+=="],
    ["--bearer", S],
    ["--sas", S],
    ["sh", "-c", f"python train.py --key {S} --lr 1"],
    ["sh", "-c", f"mysql -p{S} -u me"],
    ["srun", "-p", "gpu", "python", "train.py", "-p", S],
    # a user and a password in one word
    ["-u", f"me:{S}"],
    ["--user", f"me:{S}"],
    ["sh", "-c", f"curl -u me:{S} http://host"],
    [f"https://me:{S}@host/x"],
    [f"postgresql://me:{S}@host/db"],
    # variables of the environment
    [f"AWS_SECRET_ACCESS_KEY={S}", "python"],
    [f"HF_TOKEN={S}", "python"],
    ["env", f"DB_PASS={S}", "python"],
    [f"GH_PAT={S}"],
    [f"MYSQL_PWD={S}"],
    [f"OPENAI_KEY={S}"],
    ["sh", "-c", f"HF_TOKEN={S} python train.py"],
    # parts of an address
    [f"https://host/?access_token={S}"],
    [f"https://host/?sig={S}"],
    [f"https://host/?sv=1&sig={S}&se=2"],
    [f"https://host/?X-Amz-Signature={S}&b=1"],
    [f"https://host/?X-Goog-Signature={S}"],
    [f"https://host/?key={S}"],
    [f"https://host/?X-Amz-Security-Token={S}"],
    [f"https://host/?auth={S}"],
    [f"https://host/?code={S}"],
    # JSON, YAML, connection strings
    ["--credentials", f'{{"user": "me", "password": "{S}"}}'],
    ["--config", f'{{"auth": {{"token": "{S}"}}}}'],
    ["--config", f"{{token: {S}}}"],
    ["--config", f"logger.api_key: {S}"],
    ["--connection", f"Protocol=https;AccountKey={S};Suffix=net"],
    ["--database", f"Server=x;Password={S};"],
    # shapes
    ["--pem", f"-----BEGIN RSA PRIVATE KEY-----\n{S}\nabc\n-----END RSA PRIVATE KEY-----"],
    ["--account", f'{{"x": "-----BEGIN PRIVATE KEY-----\\n{S}\\n-----END PRIVATE KEY-----"}}'],
    ["x", f"sk_live_{S}{KEY}"],
    ["x", f"gsk_{S}{KEY}"],
    ["x", f"nvapi-{S}{KEY}"],
    ["x", f"xoxb-{S}{KEY}"],
]


@pytest.mark.parametrize("words", SECRET, ids=" ".join)
def test_no_secret_of_a_known_kind_is_kept(words):
    """By the name of its option, header, variable or field, or by its shape.

    The words around it stay.
    """
    shown = without_secrets(words)

    assert len(shown) == len(words)
    assert "***" in " ".join(shown)
    assert not any(secret in word for word in shown for secret in (S, KEY))


NO_SECRET = [
    # of models and data
    "--key-padding-mask",
    "--tokenizer bert",
    "--max-tokens 100",
    "--tokens-per-batch 4096",
    "--num-keys 4",
    "--sort-key length",
    "--pass-through",
    "--key_dim 64",
    "--token-type bpe",
    "--monitor-key val_loss",
    "--monitor_key val/loss",
    "--image-key jpg",
    "--checkpoint-key model",
    "--num-key-value-heads 8",
    "--keypoint 17",
    "--pad_token <pad>",
    "--mask-token [MASK]",
    "--stop-token <|end|>",
    "--token-dropout 0.1",
    "--max-new-tokens 64",
    "--two-pass true",
    "--passes 3",
    "--n-pass 4",
    "--encompass x",
    "--secretary x",
    "data.key=image",
    "model.pass=2",
    # numbers, paths, switches and data types behind an ambiguous name
    "-p 8080",
    "-p 8080:80",
    "-p 0.5",
    "-p fp16",
    "-p bf16-mixed",
    "-p /data/x",
    "-p data/train",
    "-p8080",
    "-pfp16",
    "-p true",
    "-k 5",
    "-k 1e-3",
    "--key 3",
    "--key ~/.ssh/id",
    "--key server.pem",
    "--auth none",
    "--pass 3",
    "-u train.py",
    "-u 1000:1000",
    "--user me",
    "-pix_fmt yuv420p",
    "-preset slow",
    "--key=0.5",
    "-k $KEY",
    # options without a value, and what only sounds like a name
    "--use-auth-token --lr 1",
    "--ask-pass --lr 1",
    "-p --lr 1",
    "-k -v",
    "--pin-memory true",
    "--auth-mode iam",
    "--cookie-cutter x",
    "--signature mel",
    "--sigma 1",
    "--author me",
    "--header true",
    "--compass north",
    "s3://bucket/key/path",
    "srun -p gpu python train.py",
    "sbatch --gres gpu:1 -p debug job.sh",
]


@pytest.mark.parametrize("words", NO_SECRET)
def test_no_argument_of_a_training_is_taken_for_a_secret(words):
    """What a report leaves out cannot be compared or repeated.

    Common arguments are shown as they are.
    """
    assert without_secrets(["train.py", *words.split(" ")]) == ["train.py", *words.split(" ")]
    assert without_secrets(["sh", "-c", f"train.py {words}"])[2] == f"train.py {words}"


@pytest.mark.parametrize(
    "words",
    [
        "--max-tokens 100",
        "--pad_token <pad>",
        "--eos-token </s>",
        "--tokenizer bpe",
        "--key_dim 64",
        "--sort-key loss",
        "--label_key=target",
        "--passes 3",
        "--author me",
        "s3://bucket/key/path",
        "--token_dim=5",
        "--num_tokens=3",
        "train.py --data /a/b:c@d",
        "--image-token <image>",
        "--monkey 3",
        "--lr 0.1 --compass north",
        "--use-auth-token --lr 1",
    ],
)
def test_what_is_no_secret_is_shown(words):
    """Options of vocabularies, of layers and of columns have names that are nearly alike."""
    assert without_secrets(words.split(" ")) == words.split(" ")


@pytest.mark.parametrize(
    "piece",
    [
        "a-",
        "token=",
        "://",
        "a:",
        "key",
        "eyJ",
        "sk-",
        "password ",
        "bearer ",
        "api_",
        "-p",
        "--key ",
    ],
)
def test_a_long_word_takes_no_time(piece):
    """A word of the longest that Linux passes on is gone through once, not once for each of its
    characters.
    """
    without_secrets([piece * (131_000 // len(piece))] * 5)
