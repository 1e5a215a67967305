"""Writes tokenizer.json files whose vocabulary is that of a model of SentencePiece."""

from tokenizers import decoders, normalizers, pre_tokenizers, processors

from kccl.engine.text.tokenizer_model import _proto
from kccl.engine.text.tokenizer_pieces import NORMAL, SPACE, add_control_tokens, bpe_of_pieces

FORMS = ("prepend", "replace", "first", "always", "never")
"""How a file may say where a space is put: by a normalizer, or by a pre-tokenizer's scheme."""


def write_pieces(folder, model, form):
    """Writes a folder's tokenizer.json from a BPE model's file."""
    pieces = _proto(model).pieces
    tokens, kinds = [each.piece for each in pieces], [each.type for each in pieces]
    backend = bpe_of_pieces(tokens, [each.score for each in pieces], kinds, only=NORMAL)
    replace = normalizers.Replace(" ", SPACE)
    if form == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
    elif form == "replace":
        backend.normalizer = normalizers.Sequence([replace])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=form, split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    add_control_tokens(backend, tokens, kinds)
    begins = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.post_processor = begins
    backend.save(str(folder / "tokenizer.json"))
