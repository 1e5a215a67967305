"""The words by which a kernel tells from which rank a receive took its message.

The driver is that of tests/support/made_up_vendor.py, so no GPU is needed.
"""

import pytest

import kccl
from kccl.base.abi import ffi


def word_of(request):
    return ffi.cast("uint32_t *", request.from_any.address)


def issued(comm, x):
    request = comm.irecv(x)
    request.wait()
    return request


def test_receives_in_a_graph_have_words_of_their_own(toy_ranks, monkeypatch):
    """More of them than the ring has words. A replay changes no other receive's source."""

    def main(comm):
        x = comm.empty(8)
        assert not comm._backend.is_captured(1)
        with monkeypatch.context() as patch:
            patch.setattr(comm._backend, "is_captured", lambda stream: True)
            captured = [issued(comm, x) for _ in range(300)]
        assert len({each.from_any.address for each in captured}) == 300
        word_of(captured[0])[0] = 3 << 8 | 1
        assert (captured[0].source, captured[0].tag) == (0, 3)
        others = [issued(comm, x) for _ in range(256)]
        addresses = {each.from_any.address for each in others}
        assert addresses.isdisjoint(each.from_any.address for each in captured)
        with pytest.raises(kccl.Error, match="256 receives from any rank"):
            issued(comm, x)
        comm.reset()
        # A replay writes again; the request says so.
        word_of(captured[0])[0] = 4 << 8 | 1
        later = issued(comm, x)
        assert later.source is None and captured[0].tag == 4
        assert later.from_any.address not in addresses

    toy_ranks(main)


def test_a_receive_that_is_not_launched_gives_its_word_back(toy_ranks, monkeypatch):
    """If it did not, the ring would be full when it comes round to that word."""

    def main(comm):
        x, messages = comm.empty(8), comm._messages
        request = comm.irecv(x)
        with monkeypatch.context() as patch:
            patch.setattr(comm._backend, "set_stream", refuse)
            with pytest.raises(RuntimeError, match="refused"):
                request.wait()
        assert request.from_any is None and not request.is_done
        messages._begun.clear()
        for _ in range(256):
            word_of(issued(comm, x))[0] = 1
        word_of(issued(comm, x))[0] = 1

    toy_ranks(main)


def refuse(*_):
    raise RuntimeError("refused")
