//! X08 frames, written from the specification; valid unless a method changes a field.

use ciborium::Value;

pub mod kind {
    #![allow(missing_docs, reason = "the names are the specification's")]
    pub const TENSOR_DATA: u8 = 0x01;
    pub const TENSOR_END: u8 = 0x02;
    pub const ACK: u8 = 0x03;
    pub const NACK: u8 = 0x04;
    pub const HELLO: u8 = 0x05;
    pub const BYE: u8 = 0x06;
    pub const FLOWCTL: u8 = 0x07;
    pub const PING: u8 = 0x08;
    pub const PONG: u8 = 0x09;
    pub const STREAM_OPEN: u8 = 0x10;
    pub const STREAM_OPENED: u8 = 0x11;
    pub const STREAM_CLOSE: u8 = 0x12;
    pub const STEP: u8 = 0x13;
    pub const STEP_RESULT: u8 = 0x14;
    pub const STREAM_ERROR: u8 = 0x15;
    pub const TRUNCATE: u8 = 0x16;
    pub const DESCRIBE: u8 = 0x17;
    pub const DESCRIPTOR: u8 = 0x18;
    pub const LEAVING: u8 = 0x19;
    pub const RECEIPT: u8 = 0x1a;
    pub const TRUNCATED: u8 = 0x1b;
}

/// Flags of the header.
pub mod flag {
    /// The data of a chunk is one zstd frame.
    pub const COMPRESSED: u32 = 0x1;
    /// Last chunk of its tensor.
    pub const FINAL: u32 = 0x2;
    /// Reserved.
    pub const GRAD: u32 = 0x4;
    /// Reserved.
    pub const ENCRYPTED: u32 = 0x8;
}

pub mod dtype {
    pub const F16: u8 = 1;
    pub const F32: u8 = 2;
    pub const I8: u8 = 4;
}

/// X08 frame: a 16-byte big-endian header and a body.
#[derive(Clone, Debug)]
pub struct Frame {
    version: u8,
    kind: u8,
    reserved: u16,
    sequence: Option<u32>,
    length: Option<u32>,
    flags: u32,
    body: Vec<u8>,
    cut: usize,
}

impl Frame {
    pub fn new(kind: u8, body: impl Into<Vec<u8>>) -> Frame {
        Frame {
            version: 1,
            kind,
            reserved: 0,
            sequence: None,
            length: None,
            flags: 0,
            body: body.into(),
            cut: usize::MAX,
        }
    }

    /// PING: valid at any time in an open session, and so the base of most violations.
    pub fn ping() -> Frame {
        Frame::new(kind::PING, [0; 8])
    }

    #[must_use]
    pub fn version(self, version: u8) -> Frame {
        Frame { version, ..self }
    }

    /// Sets the reserved field.
    #[must_use]
    pub fn reserved(self, reserved: u16) -> Frame {
        Frame { reserved, ..self }
    }

    /// Sets a sequence number other than the next one.
    #[must_use]
    pub fn sequence(self, sequence: u32) -> Frame {
        let sequence = Some(sequence);
        Frame { sequence, ..self }
    }

    /// Declares this payload length, whatever the length of the body.
    #[must_use]
    pub fn length(self, length: u32) -> Frame {
        let length = Some(length);
        Frame { length, ..self }
    }

    #[must_use]
    pub fn flags(self, flags: u32) -> Frame {
        Frame { flags, ..self }
    }

    /// Keeps only the first `cut` bytes, header included.
    #[must_use]
    pub fn cut(self, cut: usize) -> Frame {
        Frame { cut, ..self }
    }

    /// Bytes on the wire; `next` is the sequence number that is due.
    pub fn encode(&self, next: u32) -> Vec<u8> {
        let length = self
            .length
            .unwrap_or_else(|| u32::try_from(self.body.len()).unwrap_or(u32::MAX));
        let mut out = vec![self.version, self.kind];
        out.extend_from_slice(&self.reserved.to_be_bytes());
        for field in [self.sequence.unwrap_or(next), length, self.flags] {
            out.extend_from_slice(&field.to_be_bytes());
        }
        out.extend_from_slice(&self.body);
        out.truncate(self.cut);
        out
    }
}

/// Control body: a CBOR map with text keys.
pub fn cbor(fields: &[(&str, Value)]) -> Vec<u8> {
    let map = fields
        .iter()
        .map(|(key, value)| (Value::from(*key), value.clone()))
        .collect();
    let mut out = Vec::new();
    // Writing integers, strings and lists to memory cannot fail.
    let _ = ciborium::into_writer(&Value::Map(map), &mut out);
    out
}

/// Body with only stream and epoch.
pub fn life(stream: u32, epoch: u32) -> Vec<u8> {
    cbor(&[("stream", stream.into()), ("epoch", epoch.into())])
}

/// STREAM_OPEN of epoch 1.
pub fn stream_open(stream: u32, weights: &[u8], layers: (u32, u32), max_positions: u32) -> Frame {
    stream_open_in(1, stream, weights, layers, max_positions)
}

/// STREAM_OPEN of any epoch.
pub fn stream_open_in(
    epoch: u32,
    stream: u32,
    weights: &[u8],
    (lo, hi): (u32, u32),
    max_positions: u32,
) -> Frame {
    let body = cbor(&[
        ("stream", stream.into()),
        ("epoch", epoch.into()),
        ("weights", Value::Bytes(weights.to_vec())),
        ("lo", lo.into()),
        ("hi", hi.into()),
        ("max_positions", max_positions.into()),
    ]);
    Frame::new(kind::STREAM_OPEN, body)
}

/// HELLO of a caller.
#[derive(Clone, Debug)]
pub struct Hello(Vec<(&'static str, Value)>);

impl Hello {
    /// Valid HELLO. Its limits are the host's defaults.
    pub fn new(purpose: &str, token: Vec<u8>) -> Hello {
        Hello(vec![
            ("versions", Value::Array(vec![1.into()])),
            ("purpose", purpose.into()),
            ("token", Value::Bytes(token)),
            ("agent", "attacker/1".into()),
        ])
    }

    /// Adds or changes a field.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl Into<Value>) -> Hello {
        self.0.retain(|(have, _)| *have != key);
        self.0.push((key, value.into()));
        self
    }

    #[must_use]
    pub fn without(mut self, key: &str) -> Hello {
        self.0.retain(|(have, _)| *have != key);
        self
    }

    /// Offers compression.
    #[must_use]
    pub fn with_zstd(self) -> Hello {
        self.with("compression", Value::Array(vec!["zstd".into()]))
    }

    pub fn frame(&self) -> Frame {
        Frame::new(kind::HELLO, cbor(&self.0))
    }
}

/// Body of TENSOR_DATA. The rank is the length of `dims`, cut to a byte.
pub fn chunk(tensor: u16, dtype: u8, dims: &[u32], data: &[u8]) -> Vec<u8> {
    let mut body = tensor.to_be_bytes().to_vec();
    body.push(dtype);
    body.push(dims.len() as u8);
    for dim in dims {
        body.extend_from_slice(&dim.to_be_bytes());
    }
    body.extend_from_slice(data);
    body
}

/// Body of STEP. `Default` is one fp16 row of one value, inline, of stream 1.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Step {
    pub stream: u32,
    pub epoch: u32,
    pub position: u32,
    pub rows: u32,
    pub width: u32,
    pub dtype: u8,
    /// 0 none, 1 last, 2 all.
    pub want: u8,
    /// Tensor with the rows, if they are not inline.
    pub tensor: Option<u16>,
    /// Reserved bytes at offset 26.
    pub reserved: [u8; 6],
    pub data: Vec<u8>,
}

impl Default for Step {
    fn default() -> Step {
        Step {
            stream: 1,
            epoch: 1,
            position: 0,
            rows: 1,
            width: 1,
            dtype: dtype::F16,
            want: 2,
            tensor: None,
            reserved: [0; 6],
            data: vec![0; 2],
        }
    }
}

impl Step {
    pub fn frame(&self) -> Frame {
        let mut body = Vec::with_capacity(32 + self.data.len());
        for field in [
            self.stream,
            self.epoch,
            self.position,
            self.rows,
            self.width,
        ] {
            body.extend_from_slice(&field.to_be_bytes());
        }
        let place = u8::from(self.tensor.is_some());
        body.extend_from_slice(&[self.dtype, self.want, place, 0]);
        body.extend_from_slice(&self.tensor.unwrap_or(0).to_be_bytes());
        body.extend_from_slice(&self.reserved);
        body.extend_from_slice(&self.data);
        Frame::new(kind::STEP, body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_the_layout_of_the_specification() {
        let frame = Frame::new(kind::TENSOR_DATA, chunk(0xabcd, dtype::F32, &[2, 3], &[9]))
            .flags(flag::FINAL);
        let expected = [
            1, 1, 0, 0, 0, 0, 0, 7, 0, 0, 0, 13, 0, 0, 0, 2, // header
            0xab, 0xcd, 2, 2, 0, 0, 0, 2, 0, 0, 0, 3, 9, // body
        ];
        assert_eq!(frame.encode(7), expected);
    }

    #[test]
    fn each_field_can_be_wrong_by_itself() {
        let right = Frame::ping().encode(5);
        for (wrong, at) in [
            (Frame::ping().version(9), 0..1),
            (Frame::ping().reserved(9), 2..4),
            (Frame::ping().sequence(9), 4..8),
            (Frame::ping().length(9), 8..12),
            (Frame::ping().flags(9), 12..16),
        ] {
            let wrong = wrong.encode(5);
            let differs: Vec<usize> = (0..24).filter(|&i| wrong[i] != right[i]).collect();
            assert!(!differs.is_empty() && differs.iter().all(|i| at.contains(i)));
        }
    }
}
