"""Sealed frames: what a side without the token, or between both sides, can do."""

import random
import socket
import threading
from collections.abc import Callable

import pytest

from octavo.sealing import (
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_BYTES,
    Handshake,
    SealedFrames,
    SealError,
    connect,
)

TOKEN, OTHER = b"0123456789abcdef", b"0123456789abcdeg"


def shake(dialler: Handshake, listener: Handshake) -> tuple[SealedFrames, SealedFrames]:
    """Run the handshake of both sides; raises what a side raises."""
    proof, none = dialler.feed(listener.begin())
    assert none is None and dialler.begin() == b""
    answer, listening = listener.feed(proof)
    rest, dialling = dialler.feed(answer)
    assert rest == b"" and listening is not None and dialling is not None
    return dialling, listening


def pair(token: bytes = TOKEN, other: bytes = TOKEN, purposes: tuple[str, str] = ("a", "a")) -> list[SealedFrames]:
    dialler = Handshake(token, purposes[0], is_dialler=True)
    return list(shake(dialler, Handshake(other, purposes[1], is_dialler=False)))


def test_frames_arrive_in_both_directions_in_pieces() -> None:
    dialling, listening = pair()
    bodies = [b"", b"x", bytes(range(256)) * 300]
    for ours, theirs in ((dialling, listening), (listening, dialling)):
        stream = b"".join(ours.seal(body[:7], body[7:]) for body in bodies)
        assert [body for at in range(0, len(stream), 1000) for body in theirs.feed(stream[at : at + 1000])] == bodies


@pytest.mark.parametrize(("other", "purposes"), [(OTHER, ("a", "a")), (TOKEN, ("a", "b"))])
def test_another_token_or_purpose_is_refused(other: bytes, purposes: tuple[str, str]) -> None:
    with pytest.raises(SealError, match="another token"):
        pair(TOKEN, other, purposes)


def test_a_dialler_proves_the_token_before_the_listener_does() -> None:
    listener = Handshake(TOKEN, "a", is_dialler=False)
    listener.begin()
    with pytest.raises(SealError):
        listener.feed((64).to_bytes(4, "little") + bytes(64))


def test_a_proof_is_of_no_use_in_another_connection() -> None:
    dialler, listener = (Handshake(TOKEN, "a", is_dialler=each) for each in (True, False))
    proof, _ = dialler.feed(listener.begin())
    assert listener.feed(proof)[1] is not None
    again = Handshake(TOKEN, "a", is_dialler=False)
    again.begin()
    with pytest.raises(SealError):
        again.feed(proof)


def test_a_reflected_proof_is_refused() -> None:
    """A stranger answers a dialler with the dialler's own bytes, and a listener with another listener's."""
    dialler = Handshake(TOKEN, "a", is_dialler=True)
    first = Handshake(TOKEN, "a", is_dialler=False)
    proof, _ = dialler.feed(first.begin())
    with pytest.raises(SealError):
        dialler.feed((32).to_bytes(4, "little") + proof[-32:])
    with pytest.raises(SealError):
        first.feed(first.begin())


def test_frames_are_refused_when_changed_repeated_reordered_or_reflected() -> None:
    def refused(change: Callable[[bytes, bytes], bytes]) -> None:
        dialling, listening = pair()
        stream = change(dialling.seal(b"one"), dialling.seal(b"two"))
        with pytest.raises(SealError):
            list(listening.feed(stream))

    refused(lambda one, two: one + one)
    refused(lambda one, two: two + one)
    refused(lambda one, two: two)
    for bit in range(8 * 4, 8 * 23):  # every bit of body and MAC
        refused(lambda one, two, bit=bit: flip(one, bit))
    dialling, _ = pair()
    with pytest.raises(SealError):
        list(dialling.feed(dialling.seal(b"one")))


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_sizes_are_refused_before_the_bytes_arrive() -> None:
    _, listening = pair()
    with pytest.raises(SealError, match="announced"):
        list(listening.feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))
    for is_dialler in (True, False):
        with pytest.raises(SealError, match="announced"):
            Handshake(TOKEN, "a", is_dialler=is_dialler).feed((MAX_HANDSHAKE_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(SealError, match="at most"):
        listening.seal(bytes(MAX_FRAME_BYTES + 1))


def test_random_bytes_never_pass() -> None:
    """2,000 streams, some of which begin as the other side would."""
    draw = random.Random(17)
    for _ in range(2000):
        dialler, listener = (Handshake(TOKEN, "a", is_dialler=each) for each in (True, False))
        challenge = listener.begin()
        proof, _ = dialler.feed(challenge)
        victim, true = draw.choice(
            [(dialler, proof), (listener, proof), (Handshake(TOKEN, "a", is_dialler=True), challenge)]
        )
        cut = draw.randrange(len(true))
        different = true[cut] ^ draw.randrange(1, 256)  # what is all of the truth does pass, and is not noise
        noise = true[:cut] + bytes([different]) + draw.randbytes(draw.randrange(200))
        try:
            _, frames = victim.feed(noise)
        except SealError:
            continue
        assert frames is None
    dialling, listening = pair()
    for _ in range(2000):
        dialling, listening = pair()
        true = dialling.seal(draw.randbytes(draw.randrange(40)))
        noise = flip(true, draw.randrange(8 * len(true)))
        try:
            assert not list(listening.feed(noise))
        except SealError:
            continue


def test_blocking_sockets_do_the_same() -> None:
    def both(other: bytes) -> list[object]:
        ours, theirs = socket.socketpair()
        found: list[object] = []

        def listen() -> None:
            try:
                far = connect(theirs, other, "ranks", is_dialler=False)
            except SealError as error:
                found.append(error)
                return
            far.send(b"hello ", far.receive())
            far.close()

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            near = connect(ours, TOKEN, "ranks", is_dialler=True)
            near.send(b"rank 1")
            found.append(near.receive())
            with pytest.raises(EOFError):
                near.receive()
            near.close()
        except SealError as error:
            found.append(error)
        thread.join(30)
        return found

    assert both(TOKEN) == [b"hello rank 1"]
    assert [type(error) for error in both(OTHER)] == [SealError, SealError]
