"""A Hugging Face tokenizer that has a chat template, and merges: a text has fewer tokens than a policy may sample for it."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config

from kinlog.schemas.settings import ModelSettings
from kinlog.workers import tokenizer as kinlog_tokenizer
from kinlog.workers.model import load_tokenizer

BEGIN, END = "<|im_start|>", "<|im_end|>"
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz,=?-+ \n"

#: Marks who speaks, as most templates do.
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Leaves out what the assistant said before its "=", as templates do with reasoning.
REWRITING = PLAIN.replace(
    "m.content }}", "m.content.split('=')[-1] if m.role == 'assistant' else m.content }}"
)

#: Refuses what it has no words for.
STRICT = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}{% endfor %}"


def chat_tokenizer(directory: Path, template: str | None = PLAIN) -> kinlog_tokenizer.Tokenizer:
    """Save a tokenizer that reads 'ab', 'cd' and '12' as one token each, and load it as a run does."""
    symbols = ["<pad>", *_CHARACTERS, "12", "ab", "cd"]
    pairs = [("1", "2"), ("a", "b"), ("c", "d")]
    model = models.BPE(vocab={symbol: place for place, symbol in enumerate(symbols)}, merges=pairs)
    made = Tokenizer(model)
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(BEGIN, special=True), AddedToken(END, special=True)])
    PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token="<pad>", chat_template=template
    ).save_pretrained(directory)
    Qwen2Config(vocab_size=len(symbols) + 2).save_pretrained(directory)
    return load_tokenizer(ModelSettings(path=str(directory)))
