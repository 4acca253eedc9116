//! WebSocket frames (RFC 6455 section 5.2): written with any bit wrong, read strictly.

/// Opcodes.
pub mod opcode {
    pub const CONTINUATION: u8 = 0x0;
    pub const TEXT: u8 = 0x1;
    /// The only kind that X08 uses.
    pub const BINARY: u8 = 0x2;
    pub const CLOSE: u8 = 0x8;
    pub const PING: u8 = 0x9;
}

/// Client WebSocket frame; by default a whole, masked, binary message.
#[derive(Clone, Debug)]
pub struct Message {
    first: u8,
    masked: bool,
    declared: Option<u64>,
    payload: Vec<u8>,
}

impl Message {
    pub fn binary(payload: impl Into<Vec<u8>>) -> Message {
        Message::of(opcode::BINARY, payload)
    }

    /// Frame of any opcode, with FIN.
    pub fn of(opcode: u8, payload: impl Into<Vec<u8>>) -> Message {
        Message {
            first: 0x80 | opcode,
            masked: true,
            declared: None,
            payload: payload.into(),
        }
    }

    /// Clears FIN: more fragments follow.
    #[must_use]
    pub fn unfinished(mut self) -> Message {
        self.first &= 0x7f;
        self
    }

    /// Sets reserved bits: 0x40, 0x20, 0x10.
    #[must_use]
    pub fn reserved(mut self, bits: u8) -> Message {
        self.first |= bits & 0x70;
        self
    }

    /// Removes the mask, as only a server may do.
    #[must_use]
    pub fn unmasked(mut self) -> Message {
        self.masked = false;
        self
    }

    /// Declares a length other than the payload's.
    #[must_use]
    pub fn declaring(mut self, length: u64) -> Message {
        self.declared = Some(length);
        self
    }

    /// Bytes on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let length = self.declared.unwrap_or(self.payload.len() as u64);
        let mut out = vec![self.first];
        let mask_bit = if self.masked { 0x80 } else { 0 };
        match (u8::try_from(length), u16::try_from(length)) {
            (Ok(short @ 0..=125), _) => out.push(mask_bit | short),
            (_, Ok(medium)) => {
                out.push(mask_bit | 126);
                out.extend_from_slice(&medium.to_be_bytes());
            }
            _ => {
                out.push(mask_bit | 127);
                out.extend_from_slice(&length.to_be_bytes());
            }
        }
        if !self.masked {
            out.extend_from_slice(&self.payload);
            return out;
        }
        // A fixed mask: no proxy between the two could be confused by it.
        const MASK: [u8; 4] = [0x3a, 0x91, 0x5c, 0xe7];
        out.extend_from_slice(&MASK);
        let masked = self.payload.iter().zip(MASK.iter().cycle());
        out.extend(masked.map(|(byte, mask)| byte ^ mask));
        out
    }
}

/// Frame from the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Received {
    pub(super) opcode: u8,
    pub(super) payload: Vec<u8>,
}

/// Removes the next whole frame from the front of `buffer`. `Ok(None)`: more bytes are needed.
///
/// # Errors
/// The host broke a rule: it must not mask, fragment or set reserved bits.
pub(super) fn take(buffer: &mut Vec<u8>) -> Result<Option<Received>, &'static str> {
    let [first, second, rest @ ..] = buffer.as_slice() else {
        return Ok(None);
    };
    let (first, second) = (*first, *second);
    if first & 0xf0 != 0x80 || second & 0x80 != 0 {
        return Err("the host sent a WebSocket frame that is fragmented, masked or reserved");
    }
    let length_bytes = match second {
        126 => 2,
        127 => 8,
        _ => 0,
    };
    let Some((length, rest)) = rest.split_at_checked(length_bytes) else {
        return Ok(None);
    };
    let length = match length_bytes {
        0 => u64::from(second),
        _ => length
            .iter()
            .fold(0, |sum, &byte| (sum << 8) | u64::from(byte)),
    };
    let payload = usize::try_from(length)
        .ok()
        .and_then(|length| rest.get(..length));
    let Some(payload) = payload.map(<[u8]>::to_vec) else {
        return Ok(None);
    };
    buffer.drain(..2 + length_bytes + payload.len());
    Ok(Some(Received {
        opcode: first & 0x0f,
        payload,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_laid_out_as_rfc_6455_says() {
        // Section 5.7: a single-frame masked message, with this mask.
        let bytes = Message::binary([1, 2, 3]).encode();
        assert_eq!(bytes[..6], [0x82, 0x83, 0x3a, 0x91, 0x5c, 0xe7]);
        assert_eq!(bytes[6..], [1 ^ 0x3a, 2 ^ 0x91, 3 ^ 0x5c]);
        let bytes = Message::binary(vec![0; 126]).unmasked().encode();
        assert_eq!(bytes[..4], [0x82, 126, 0, 126]);
        let bytes = Message::of(opcode::TEXT, []).declaring(1 << 24).encode();
        assert_eq!(bytes[..10], [0x81, 0xff, 0, 0, 0, 0, 1, 0, 0, 0]);
        let fragment = Message::binary([]).unfinished().reserved(0x40);
        assert_eq!(fragment.encode()[0], 0x42);
    }

    #[test]
    fn frames_are_read_one_by_one_however_they_arrive() {
        let lengths = [0usize, 5, 125, 126, 70_000];
        let sent: Vec<u8> = lengths
            .iter()
            .flat_map(|&length| Message::binary(vec![7; length]).unmasked().encode())
            .collect();
        let (mut buffer, mut read) = (Vec::new(), Vec::new());
        for piece in sent.chunks(999) {
            buffer.extend_from_slice(piece);
            while let Some(frame) = take(&mut buffer).unwrap() {
                assert_eq!(frame.opcode, opcode::BINARY);
                read.push(frame.payload.len());
            }
        }
        assert_eq!((read.as_slice(), buffer.len()), (&lengths[..], 0));
        assert!(take(&mut Message::binary([1]).encode()).is_err());
    }
}
