#!/usr/bin/env python3
"""An independent client of a shard host, written from the specification alone.

    specs/session-grant.md         node ids and the session token
    specs/x08-tensor-transport.md  everything on the wire ("X08" below)
    specs/shard-host.md            behaviour of a host

It shares no code with the reference implementation. Python's own `ssl` is the TLS library;
from PyPI come `cryptography` (keys, certificate), `cbor2`, and `websockets`, of which only the
protocol part without input and output is used: one thread, one socket, one loop that reads.

As a command it tests a host against the specification, and prints one JSON object:

    x08_client.py --address ADDR:PORT#NODEID --secret HEX --weights HEX --lo 0 --hi 14 \
        --width 576 --rows rows.bin --out answer.bin --block block.bin --block-out answer2.bin

`rows.bin` and `block.bin` hold rows of the residual stream, fp16, little-endian, row after row.
The first must fit into one message (`inline_max`, 64 KiB); the second must not, so that it
travels as chunks, under credit. The answers are the results of layers LO to HI.

Exit status: 0, all well; 1, the host broke the specification; 2, wrong arguments; 3, the host
or the network refused, with the reason under "refused". The secret on the command line is for
tests only, because every process of the machine can read it there.
"""

import argparse
import base64
import datetime
import json
import os
import socket
import ssl
import struct
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import cbor2
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from websockets.client import ClientProtocol
from websockets.frames import Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

# ---------------------------------------------------------------------------------------------
# Failures


class Refused(Exception):
    """The session was refused or ended by the other side, with a code of X08 section 9."""

    def __init__(self, code, number=None, detail=""):
        super().__init__(f"{code} ({number}) {detail}")
        self.code, self.number, self.detail = code, number, detail


class StreamError(Exception):
    """STREAM_ERROR: the host ended one stream."""

    def __init__(self, code, position, message):
        super().__init__(f"{code} at {position}: {message}")
        self.code, self.position = code, position


class Broken(Exception):
    """The host violated the specification."""


def must(condition, sentence):
    # Not `assert`, which `python -O` removes.
    if not condition:
        raise Broken(sentence)


# ---------------------------------------------------------------------------------------------
# Node ids (session-grant.md, section 1)

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P


def point_add(a, b):
    """Adds two points of the curve in affine coordinates; the formulas are complete."""
    (x1, y1), (x2, y2) = a, b
    k = D * x1 * x2 * y1 * y2 % P
    x3 = (x1 * y2 + x2 * y1) * pow(1 + k, -1, P)
    y3 = (y1 * y2 + x1 * x2) * pow(1 - k, -1, P)
    return x3 % P, y3 % P


def is_node_key(key):
    """Whether 32 bytes are the canonical encoding of a point of the prime-order subgroup."""
    number = int.from_bytes(key, "little")
    sign, y = number >> 255, number & (2**255 - 1)
    if y >= P:
        return False
    # x^2 = (y^2 - 1) / (d y^2 + 1), and the square root as RFC 8032 section 5.1.3 takes it.
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if x * x % P != square:
        x = x * pow(2, (P - 1) // 4, P) % P
    if x * x % P != square or (x == 0 and sign):
        return False
    point = (x if x & 1 == sign else P - x, y)
    neutral = (0, 1)
    product, bits = neutral, ORDER
    while bits:
        if bits & 1:
            product = point_add(product, point)
        point, bits = point_add(point, point), bits >> 1
    return product == neutral and (x, y) != neutral


def node_id(key):
    return "ed25519:" + base64.urlsafe_b64encode(key).rstrip(b"=").decode()


def parse_node_id(text):
    prefix, _, digits = text.partition(":")
    try:
        key = base64.b64decode(digits + "=", altchars=b"-_", validate=True)
    except ValueError:
        key = b""
    # Writing it again catches unused bits that are not zero.
    if prefix != "ed25519" or len(key) != 32 or node_id(key) != text or not is_node_key(key):
        raise ValueError(f"{text!r} is not a node id")
    return key


# ---------------------------------------------------------------------------------------------
# The session token (session-grant.md, sections 2 and 3)

SCOPE = "experimental.distributed_llm.shard.serve@1.0"


def session_token(key, audience, now):
    """A grant for this node itself, from now on, for ten minutes."""
    public = key.public_key().public_bytes_raw()
    # The order of the entries is that of the specification; `cbor2` keeps it, and writes
    # shortest heads and definite lengths.
    body = cbor2.dumps({
        "v": 1,
        "id": os.urandom(16),
        "aud": audience,
        "exp": now + 600,
        "iss": public,
        "nbf": now,
        "sub": public,
        "scope": SCOPE,
    })
    return body + key.sign(b"hearthnet/session-grant/v1\0" + body)


# ---------------------------------------------------------------------------------------------
# TLS (X08 section 1.1)


def tls_context(key):
    """TLS 1.3 with a self-signed certificate over the node key, without a trust store."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x08 client")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(2100, 1, 1))
        .sign(key, None)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # `ssl` reads keys from files only. The directory is this user's alone, and gone at once.
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "node.pem"
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        path.write_bytes(secret + certificate.public_bytes(Encoding.PEM))
        context.load_cert_chain(path)
    return context


def peer_key(tls):
    """The node key in the host's certificate, its only meaningful field."""
    key = x509.load_der_x509_certificate(tls.getpeercert(binary_form=True)).public_key()
    must(isinstance(key, Ed25519PublicKey), "the host's certificate is not an Ed25519 one")
    return key.public_bytes_raw()


# ---------------------------------------------------------------------------------------------
# Frames (X08 section 2)

TENSOR_DATA, TENSOR_END, ACK, NACK, HELLO, BYE, FLOWCTL, PING, PONG = range(0x01, 0x0A)
STREAM_OPEN, STREAM_OPENED, STREAM_CLOSE, STEP, STEP_RESULT = range(0x10, 0x15)
STREAM_ERROR, TRUNCATE, DESCRIBE, DESCRIPTOR, LEAVING = range(0x15, 0x1A)

HEADER = struct.Struct(">BBHIII")  # version, type, reserved, sequence, length, flags
STEP_HEAD = struct.Struct(">IIIIIBBBBH6s")
RESULT_HEAD = struct.Struct(">IIIIIBBBBHHIII")
FINAL = 0x2
FP16 = 1
ELEMENT_BYTES = {1: 2, 2: 4, 3: 2, 4: 1}
NONE, LAST, ALL = 0, 1, 2

# Required and optional keys of the bodies that a host sends. HELLO may
# have any key.
LIFE = {"stream", "epoch"}
BODIES = {
    TENSOR_END: ({"tensor"}, set()),
    ACK: ({"tensor", "chunks"}, {"end"}),
    NACK: ({"tensor", "code"}, set()),
    BYE: ({"code"}, {"detail"}),
    FLOWCTL: ({"grant"}, set()),
    STREAM_OPENED: (LIFE, set()),
    STREAM_ERROR: (LIFE | {"code"}, {"position", "message"}),
    LEAVING: ({"within_ms"}, set()),
}

# Limits that this client offers. Chunks have the minimum size and the window is narrow, so that
# a tensor of a few rows needs more credit than either side has at first. No compression.
LIMITS = {"chunk_bytes": 4096, "window_chunks": 4, "inline_max": 65536}
DEFAULTS = {
    "chunk_bytes": 1 << 20,
    "inline_max": 1 << 16,
    "lifetime_ms": 3_600_000,
    "window_chunks": 16,
    "recv_buffer_bytes": 1 << 26,
    "max_steps": 64,
    "compression": [],
}


@dataclass
class Result:
    """A complete STEP_RESULT of `rows` rows; `chunks` is 0 for inline rows."""

    stream: int
    epoch: int
    position: int
    rows: int
    width: int
    dtype: int
    data: bytes
    compute_us: int
    queue_us: int
    chunks: int = 0


@dataclass
class Incoming:
    """A tensor on its way here, and the result that announced it."""

    result: Result
    data: bytearray = field(default_factory=bytearray)


class Session:
    """A session on a host, open when the constructor returns."""

    def __init__(self, address, host_key, key, audience=None, timeout=60.0):
        self.sent = self.received = 0
        self.messages = []  # whole ones that were read and not yet looked at
        self.partial = b""  # fragments of the next one
        self.opened, self.descriptor, self.pongs = set(), None, []
        self.results, self.errors = [], {}
        self.leaving = None
        self.incoming = {}  # tensor id: Incoming
        self.unacknowledged = {}  # tensor id: [bytes, chunks] of tensors sent and not gone
        self.next_tensor = 1
        self.counts = {"chunks_sent": 0, "acks_received": 0, "waits_for_credit": 0}

        host, _, port = address.rpartition(":")
        tcp = socket.create_connection((host.strip("[]"), int(port)), timeout)
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self.tls = tls_context(key).wrap_socket(tcp, server_hostname=None)
            # Checks the host's identity before anything else is sent.
            if peer_key(self.tls) != host_key:
                raise Refused("identity_mismatch", 4080)
            self._upgrade(address)
        except (ssl.SSLError, ConnectionError) as error:
            # A host that does not admit this key says so with a TLS alert, which arrives
            # with the first bytes that are read: in the upgrade.
            reason = getattr(error, "reason", None) or type(error).__name__
            raise Refused(f"tls:{reason}") from error
        self._hello(key, audience or host_key)

    # -- WebSocket (X08 section 1.2)

    def _upgrade(self, address):
        # No extensions, no subprotocols. The size limit is the greatest message of section 8.
        largest = max(16 + 36 + LIMITS["chunk_bytes"], 16 + 40 + LIMITS["inline_max"])
        self.ws = ClientProtocol(parse_uri(f"wss://{address}/tensor/v1"), max_size=largest)
        self.ws.send_request(self.ws.connect())
        self._flush()
        while self.ws.state is State.CONNECTING:
            self._read()
            self.ws.events_received()
            if self.ws.handshake_exc is not None:
                raise Broken(f"the upgrade failed: {self.ws.handshake_exc}")

    def _flush(self):
        for data in self.ws.data_to_send():
            if data:  # an empty one asks for the end of what is sent: closing does that
                self.tls.sendall(data)

    def _read(self):
        data = self.tls.recv(1 << 16)
        if data:
            self.ws.receive_data(data)
        else:
            self.ws.receive_eof()

    def _message(self):
        """The next whole binary message."""
        while not self.messages:
            if self.ws.close_rcvd is not None or self.ws.state is State.CLOSED:
                close = self.ws.close_rcvd
                raise Refused(*((close.reason, close.code) if close else ("lost", 4005)))
            self._read()
            self._flush()
            for frame in self.ws.events_received():
                if frame.opcode in (Opcode.BINARY, Opcode.CONT):
                    self.partial += frame.data
                    if frame.fin:
                        self.messages.append(self.partial)
                        self.partial = b""
                elif frame.opcode not in (Opcode.CLOSE, Opcode.PING, Opcode.PONG):
                    raise Broken(f"the host sent a WebSocket frame of kind {frame.opcode}")
        return self.messages.pop(0)

    # -- Frames

    def send(self, kind, payload=b"", flags=0):
        self.sent += 1
        self.ws.send_binary(HEADER.pack(1, kind, 0, self.sent, len(payload), flags) + payload)
        self._flush()

    def send_map(self, kind, **body):
        self.send(kind, cbor2.dumps(body))

    def receive(self):
        """The next frame: type, flags, payload."""
        message = self._message()
        must(len(message) >= HEADER.size, "a message is shorter than a header")
        version, kind, reserved, sequence, length, flags = HEADER.unpack_from(message)
        self.received += 1
        must(version == 1 and reserved == 0, "a header of another version")
        must(sequence == self.received, "a sequence number is out of order")
        must(length == len(message) - HEADER.size, "a payload length does not match its message")
        must(flags == 0 or kind == TENSOR_DATA, "a flag where none is defined")
        return kind, flags, message[HEADER.size :]

    def receive_map(self, kind, payload):
        must(len(payload) <= 4096 - HEADER.size, f"the body of frame {kind:#x} is too big")
        body = cbor2.loads(payload)
        must(isinstance(body, dict), f"the body of frame {kind:#x} is no map")
        needed, optional = BODIES.get(kind, (set(), set(body)))
        must(needed <= set(body) <= needed | optional, f"frame {kind:#x} has other keys: {body}")
        return body

    # -- HELLO (X08 section 3)

    def _hello(self, key, audience):
        token = session_token(key, audience, int(time.time()))
        self.send_map(
            HELLO, versions=[1], purpose="pipeline", token=token, agent="x08-client-py/1", **LIMITS
        )
        kind, _, payload = self.receive()
        body = self.receive_map(kind, payload)
        if kind == BYE:
            self._end(body)
        must(kind == HELLO, "the host's first frame is neither HELLO nor BYE")
        must(body.get("version") == 1, "the host chose another version than the one offered")
        theirs = {name: body.get(name, default) for name, default in DEFAULTS.items()}
        ours = DEFAULTS | LIMITS
        # Shared limits are the smaller ones; the host's buffer is the host's own limit.
        self.chunk_bytes = min(ours["chunk_bytes"], theirs["chunk_bytes"])
        self.inline_max = min(ours["inline_max"], theirs["inline_max"])
        self.window = theirs["window_chunks"]
        self.buffer = theirs["recv_buffer_bytes"]
        self.hello = body

    def _end(self, bye):
        """After the host's BYE, its close frame follows with the number of the code."""
        try:
            while True:
                self._message()  # nothing after BYE counts
        except Refused as closed:
            raise Refused(bye["code"], closed.number, bye.get("detail", "")) from None

    # -- The one loop

    def pump(self):
        """Takes one frame from the host."""
        kind, flags, payload = self.receive()
        if kind == TENSOR_DATA:
            return self._tensor_data(flags, payload)
        if kind == STEP_RESULT:
            return self._step_result(payload)
        if kind == DESCRIPTOR:
            must(1 <= len(payload) <= 4080, "a descriptor of another length")
            self.descriptor = cbor2.loads(payload)
            return None
        if kind == PING:
            return self.send(PONG, payload)
        if kind == PONG:
            return self.pongs.append(payload)
        body = self.receive_map(kind, payload)
        if kind == STREAM_OPENED:
            self.opened.add((body["stream"], body["epoch"]))
        elif kind == STREAM_ERROR:
            error = StreamError(body["code"], body.get("position"), body.get("message", ""))
            self.errors[body["stream"], body["epoch"]] = error
        elif kind == ACK:
            self._ack(body["tensor"], body["chunks"], body.get("end", False))
        elif kind == NACK:
            self._nack(body["tensor"])
        elif kind == TENSOR_END:
            # The host abandons a result. Its received chunks are acknowledged already.
            must(body["tensor"] in self.incoming, "TENSOR_END of a tensor that never began")
            del self.incoming[body["tensor"]]
            self.send_map(ACK, tensor=body["tensor"], chunks=0, end=True)
        elif kind == LEAVING:
            # Open streams may go on for that long. A new stream would be refused.
            self.leaving = body["within_ms"]
        elif kind == FLOWCTL:
            self.window += body["grant"]
        elif kind == BYE:
            self._end(body)
        else:
            raise Broken(f"the host sent a frame of type {kind:#x}")
        return None

    def wait(self, ready, life=None):
        """Pumps until `ready()` returns a value, or the stream `life` has ended."""
        while not (value := ready()):
            if life in self.errors:
                raise self.errors[life]
            self.pump()
        return value

    # -- Tensors (X08 section 5)

    def send_tensor(self, tensor, dims, data):
        """The chunks of an announced tensor, each when the host has credit for it.

        Stops when the host refuses the tensor: its step fails with STREAM_ERROR.
        """
        head = struct.pack(f">HBB{len(dims)}I", tensor, FP16, len(dims), *dims)
        for start in range(0, len(data), self.chunk_bytes):
            if self.window == 0:
                self.counts["waits_for_credit"] += 1
                self.wait(lambda: self.window)
            if tensor not in self.unacknowledged:
                return self.send_map(TENSOR_END, tensor=tensor)
            self.window -= 1
            self.unacknowledged[tensor][1] += 1
            last = start + self.chunk_bytes >= len(data)
            chunk = data[start : start + self.chunk_bytes]
            self.send(TENSOR_DATA, head + chunk, FINAL if last else 0)
            self.counts["chunks_sent"] += 1
        return None

    def _nack(self, tensor):
        must(tensor in self.unacknowledged, "a NACK for a tensor that is gone")
        self.window += self.unacknowledged.pop(tensor)[1]

    def _ack(self, tensor, chunks, end):
        must(tensor in self.unacknowledged, "an ACK for a tensor that is gone")
        self.counts["acks_received"] += 1
        state = self.unacknowledged[tensor]
        must(chunks <= state[1], "an ACK of more chunks than were sent")
        state[1] -= chunks
        self.window += chunks
        if end:
            must(state[1] == 0, "an ACK ends a tensor without its last units")
            del self.unacknowledged[tensor]

    def _tensor_data(self, flags, payload):
        tensor, dtype, rank = struct.unpack_from(">HBB", payload)
        dims = struct.unpack_from(f">{rank}I", payload, 4)
        must(flags in (0, FINAL), "a flag that was not negotiated")
        must(tensor in self.incoming, "chunks of a tensor that no result announced")
        incoming = self.incoming[tensor]
        result = incoming.result
        must(dims == (result.rows, result.width), "a tensor's shape differs from its result's")
        must(dtype == result.dtype, "a tensor's element type differs from its result's")
        total = result.rows * result.width * ELEMENT_BYTES[dtype]
        chunk = payload[4 + 4 * rank :]
        due = min(self.chunk_bytes, total - len(incoming.data))
        must(len(chunk) == due, "a chunk has the wrong length")
        incoming.data += chunk
        result.chunks += 1
        whole = len(incoming.data) == total
        must(whole == (flags == FINAL), "FINAL is missing or misplaced")
        if not whole:
            return self.send_map(ACK, tensor=tensor, chunks=1)
        # The tensor is consumed here, so its last unit of credit is returned at once.
        del self.incoming[tensor]
        result.data = bytes(incoming.data)
        self.results.append(result)
        return self.send_map(ACK, tensor=tensor, chunks=1, end=True)

    # -- Streams (X08 section 4)

    def open(self, stream, epoch, weights, lo, hi, max_positions):
        self.send_map(
            STREAM_OPEN,
            stream=stream,
            epoch=epoch,
            weights=weights,
            lo=lo,
            hi=hi,
            max_positions=max_positions,
        )
        self.wait(lambda: (stream, epoch) in self.opened, (stream, epoch))

    def step(self, stream, epoch, position, width, data, want=ALL):
        """Runs fp16 rows through the stream's layers, and waits for the result."""
        rows, rest = divmod(len(data), width * ELEMENT_BYTES[FP16])
        must(rest == 0 and rows > 0, "the rows are not whole")
        inline = len(data) <= self.inline_max
        tensor = 0 if inline else self.next_tensor
        head = STEP_HEAD.pack(
            stream, epoch, position, rows, width, FP16, want, 0 if inline else 1, 0, tensor, bytes(6)
        )
        if inline:
            self.send(STEP, head + data)
        else:
            self.next_tensor += 1
            used = sum(size for size, _ in self.unacknowledged.values())
            must(used + len(data) <= self.buffer, "the host's buffer is too small for the rows")
            self.unacknowledged[tensor] = [len(data), 0]
            self.send(STEP, head)
            self.send_tensor(tensor, (rows, width), data)
        self.wait(lambda: self.results, (stream, epoch))
        result = self.results.pop(0)
        must((result.stream, result.epoch) == (stream, epoch), "a result of another stream")
        must(result.position == position, "a result of another step")
        if want != NONE:
            must(result.dtype == FP16 and result.width == width, "a result of another shape")
        must(result.rows == {NONE: 0, LAST: 1, ALL: rows}[want], "another number of rows")
        return result

    def _step_result(self, payload):
        (stream, epoch, position, rows, width, dtype, zero0, place, zero1, tensor, zero2,
         compute_us, queue_us, zero3) = RESULT_HEAD.unpack_from(payload)  # fmt: skip
        must(not (zero0 or zero1 or zero2 or zero3), "a reserved field of a result is not zero")
        must(dtype in ELEMENT_BYTES, "an unknown element type")
        size = rows * width * ELEMENT_BYTES[dtype]
        data = payload[RESULT_HEAD.size :]
        result = Result(
            stream, epoch, position, rows, width, dtype, data, compute_us, queue_us
        )
        if place == 0:
            must(tensor == 0, "inline rows with a tensor id")
            must(len(data) == size <= self.inline_max, "inline rows of another length")
            self.results.append(result)
        else:
            must(place == 1 and not data, "an unknown place, or rows in two places")
            must(tensor not in self.incoming, "a tensor id that is in use")
            self.incoming[tensor] = Incoming(result)

    def truncate(self, stream, epoch, position):
        self.send_map(TRUNCATE, stream=stream, epoch=epoch, position=position)

    def close_stream(self, stream, epoch):
        self.opened.discard((stream, epoch))
        self.send_map(STREAM_CLOSE, stream=stream, epoch=epoch)

    def describe(self):
        self.send(DESCRIBE)
        return self.wait(lambda: self.descriptor)

    def ping(self):
        cookie = os.urandom(8)
        self.send(PING, cookie)
        self.wait(lambda: cookie in self.pongs)

    def bye(self):
        """Ends the session; returns the number and reason of the host's close frame."""
        self.send_map(BYE, code="normal")
        self.ws.send_close(4000, "normal")
        self._flush()
        try:
            while True:
                self._message()  # nothing after BYE counts
        except Refused as closed:
            self.tls.close()
            return closed.number, closed.code


# ---------------------------------------------------------------------------------------------
# The test of a host


def fails_with(code, action):
    try:
        action()
    except StreamError as error:
        must(error.code == code, f"expected {code}, got {error.code}")
    else:
        raise Broken(f"expected {code}, got no error")


def examine(session, args, rows, block):
    """Sends every kind of frame; returns the answers to the rows and to the block."""
    weights, width, lo, hi = args.weights, args.width, args.lo, args.hi
    size = width * ELEMENT_BYTES[FP16]
    count = len(rows) // size
    must(len(rows) <= session.inline_max < len(block), "the rows must fit inline, the block not")
    positions = max(count, len(block) // size)

    def step(epoch, first, end, want=ALL):
        """Rows `first` to `end` of the row file at their positions."""
        return session.step(7, epoch, first, width, rows[first * size : end * size], want).data

    session.ping()

    descriptor = session.describe()
    first, last = descriptor["layer_range"]
    must(descriptor["weights_sha256"] == weights.hex(), "the host serves other weights")
    must(first <= lo <= hi <= last, "the host does not serve these layers")
    must(descriptor["boundary_dtype"] == "fp16", "the model's rows are not fp16")

    # All rows in one step.
    session.open(7, 0, weights, lo, hi, positions)
    answer = step(0, 0, count)
    session.close_stream(7, 0)

    # A new epoch of the same stream: two steps, and single rows, give the same bits.
    half = max(1, count // 2)
    session.open(7, 1, weights, lo, hi, positions)
    split = step(1, 0, half) + (step(1, half, count) if half < count else b"")
    must(split == answer, "two steps give other bits than one")
    session.truncate(7, 1, 0)
    single = b"".join(step(1, n, n + 1) for n in range(count))
    must(single == answer, "single rows give other bits than one step")

    # Truncated and replayed, with TRUNCATE and by a step at an earlier position.
    session.truncate(7, 1, half)
    must(step(1, half, count) == answer[half * size :], "a replay after TRUNCATE differs")
    must(step(1, 0, count, LAST) == answer[-size:], "a replay in place differs")
    must(step(1, 0, count, NONE) == b"", "rows although none were requested")

    # An older epoch is refused, and so is a step beyond the end; both end their stream.
    fails_with("stale_epoch", lambda: session.open(7, 0, weights, lo, hi, positions))
    session.close_stream(7, 0)
    fails_with("position_gap", lambda: session.step(7, 1, count + 1, width, rows[:size]))
    session.close_stream(7, 1)
    fails_with("unknown_stream", lambda: session.step(8, 0, 0, width, rows[:size]))
    session.close_stream(8, 0)
    fails_with("weights_mismatch", lambda: session.open(8, 1, bytes(32), lo, hi, positions))
    session.close_stream(8, 1)
    # Rows as a tensor for an unknown stream: its credit is returned too.
    fails_with("unknown_stream", lambda: session.step(8, 2, 0, width, block))
    session.wait(lambda: not session.unacknowledged)
    session.close_stream(8, 2)

    # The large block, which needs chunks and credit both ways; then its first row alone.
    session.open(9, 0, weights, lo, hi, positions)
    large = session.step(9, 0, 0, width, block)
    again = session.step(9, 0, 0, width, block[:size])
    must(again.data == large.data[:size], "the first row of the block alone differs")
    # All credit is returned: the host has released the block.
    session.wait(lambda: not session.unacknowledged)
    session.close_stream(9, 0)
    return descriptor, answer, large


def hexadecimal(length):
    def parse(text):
        data = bytes.fromhex(text)
        if len(data) != length:
            raise ValueError("wrong length")
        return data

    return parse


def arguments():
    parser = argparse.ArgumentParser(description="Holds a shard host to its specification.")
    parser.add_argument("--address", required=True, help="ADDR:PORT#NODEID")
    parser.add_argument("--secret", required=True, type=hexadecimal(32), help="node key, hex")
    parser.add_argument("--weights", required=True, type=hexadecimal(32), help="weights id, hex")
    parser.add_argument("--lo", required=True, type=int, help="first layer")
    parser.add_argument("--hi", required=True, type=int, help="last layer, inclusive")
    parser.add_argument("--width", required=True, type=int, help="values per row")
    parser.add_argument("--rows", required=True, type=Path, help="fp16 rows that fit inline")
    parser.add_argument("--block", required=True, type=Path, help="fp16 rows that do not")
    parser.add_argument("--out", required=True, type=Path, help="file for the rows' answer")
    parser.add_argument("--block-out", required=True, type=Path, help="file for the block's")
    parser.add_argument(
        "--audience", type=parse_node_id, help="node id to make the token out to (default: the host)"
    )
    return parser.parse_args()


def main():
    args = arguments()
    address, _, host = args.address.partition("#")
    key = Ed25519PrivateKey.from_private_bytes(args.secret)
    try:
        session = Session(address, parse_node_id(host), key, args.audience)
        descriptor, answer, large = examine(
            session, args, args.rows.read_bytes(), args.block.read_bytes()
        )
        must(descriptor["host"] == host, "the descriptor names another host")
        number, reason = session.bye()
    except Refused as refused:
        report = {"code": refused.code, "close": refused.number, "detail": refused.detail}
        print(json.dumps({"refused": report}))
        return 3
    except OSError as error:
        print(json.dumps({"refused": {"code": "network", "close": None, "detail": str(error)}}))
        return 3
    except (Broken, StreamError) as error:
        print(json.dumps({"broken": str(error)}))
        return 1
    args.out.write_bytes(answer)
    args.block_out.write_bytes(large.data)
    report = {
        "descriptor": descriptor,
        "hello": session.hello,
        "close": [number, reason],
        "result_chunks": large.chunks,
        **session.counts,
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
