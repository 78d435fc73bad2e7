"""How many tokens Megatron's embedding holds: the tokenizer's, padded."""

from plait.dialects.huggingface_names import named
from plait.dialects.megatron.arguments import Arguments
from plait.spec import presets
from plait.spec.findings import UserError
from plait.spec.model import Model

#: Tokenizers of one vocabulary only: GPT-2's byte pairs, BERT's word pieces, Llama 2's pieces.
KINDS = {
    "GPT2BPETokenizer": 50257,
    "BertWordPieceCase": 28996 + 100,
    "BertWordPieceLowerCase": 30522,
    "Llama2Tokenizer": 32000,
    "DeepSeekV2Tokenizer": 102400,
    "DeepSeekV3Tokenizer": 129280,
    "Llama3Tokenizer": 128256,
    "MixtralTokenizer": 32000,
}
#: Parts of a tokenizer file's name -> vocabulary.
FILES = {"128k": 131072, "256k": 256000, "500000.128k": 131072, "gpt2": 50257}
#: Where nothing says more.
ASSUMED = 50257


def vocabulary(arguments: Arguments, told: Model | None) -> int | None:
    """Rows of the embedding; None where a person names the model."""
    take, where = arguments.take, "model.vocab"
    size = take("vocab_size", int, None, where)
    padded = take("padded_vocab_size", int, None, where)
    kind = take("tokenizer_type", str, None, where, False)
    model = take("tokenizer_model", str, None, where, False)
    unit = take("make_vocab_size_divisible_by", int, 128, where)
    pads = arguments.switch("pad_vocab_size", True, where)
    if told is not None:
        return None
    if padded:
        return padded
    if size is None and arguments.told(where):
        return None
    known = size or of_tokenizer(kind, model)
    if known is None:
        message = f"the vocabulary is the tokenizer's, which the file does not show; {ASSUMED} "
        arguments.note("megatron-vocabulary", f"{message}assumed (say --model.vocab)", ASSUMED)
    known = known or ASSUMED
    tp = arguments.take("tensor_model_parallel_size", int, 1, "layout.tp")
    step = unit * tp if pads and unit and unit > 0 and tp > 0 else 1
    return -(-known // step) * step


def of_tokenizer(kind: str | None, model: str | None) -> int | None:
    """The vocabulary of a tokenizer as far as its kind or its name says it."""
    if kind in KINDS:
        return KINDS[kind]
    if not model:
        return None
    name = model.rstrip("/").rpartition("/")[2].lower()
    by_file = next((size for part, size in FILES.items() if part in name), None)
    if by_file is not None and "." in name:
        return by_file
    found = named(model)
    if found is None:
        return None
    if "model.vocab" in found.fields:
        return found.fields["model.vocab"]
    try:
        return presets.model(found.fields["model"]).vocab
    except (KeyError, UserError):
        return None
