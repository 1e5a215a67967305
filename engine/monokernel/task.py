"""Makes and reads the structs of abi.inc that the host and the monokernel exchange."""

from typing import Any

from ..base.core import ffi, lib
from ..model.ops import layer_of
from ..model.program import Program
from ..model.structs import rule_of

TOKEN_BYTES: int = ffi.sizeof("KcclDecodeToken")
MAILBOX_BYTES: int = ffi.sizeof("KcclDecodeMailbox")
NO_LOGITS = len(ffi.new("KcclDecodeTask *").logits) * (0,)


def new_task(copied: Any = None) -> Any:
    """Returns a copy of a KcclDecodeTask. If `copied` is None, returns a new one whose fields are
    zero.
    """
    return ffi.new("KcclDecodeTask *") if copied is None else ffi.new("KcclDecodeTask *", copied[0])


def mailbox_at(address: int) -> Any:
    """Returns the KcclDecodeMailbox at an address."""
    return ffi.cast("KcclDecodeMailbox *", address)


def tokens_at(address: int, num: int) -> Any:
    """Returns the `num` KcclDecodeTokens at an address."""
    return ffi.cast(f"KcclDecodeToken(*)[{num}]", address)[0]


def id_and_end(token: Any) -> tuple[int, int]:
    """Returns the id of a KcclDecodeToken, and its KcclEngineEnd."""
    end, token_id = divmod(token.id_and_end, 1 << lib.kKcclDecodeEndAt)
    return token_id, end


def layers(program: Program) -> bytes:
    """Returns the rules of all layers' modules, in the kernel's form: KcclDecodeLayer [layers]."""

    ops = program.by_name
    ends = [kind.name for kind in layer_of(program.config) if kind.ends_module]
    rules = [
        {
            "modules": [rule_of(ops[f"layers.{i}.{name}"]) for name in ends],
            "window": ops[f"layers.{i}.attend"].window,
        }
        for i in range(program.config.num_layers)
    ]
    return bytes(ffi.buffer(ffi.new("KcclDecodeLayer[]", rules)))
