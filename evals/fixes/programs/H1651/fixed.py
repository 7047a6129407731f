from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

vocabulary = {"[PAD]": 0, "[UNK]": 1, "a": 2, "cat": 3, "sat": 4}
model = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
model.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]", model_max_length=8
)

batch = tokenizer(
    ["a cat sat", "a cat"], padding="max_length", truncation=True, return_tensors="pt"
)
print("tokens", tuple(batch["input_ids"].shape))
