//! `tokenizer.model`: a SentencePiece vocabulary in protocol buffer encoding.
//!
//! Only fields needed in a model file are read: of `ModelProto` the pieces (field 1: text 1, score
//! 2, type 3) and the trainer's model type (field 2, in it field 3).

/// Types of pieces, as in `SentencePiece.Type`.
pub(super) const UNKNOWN: i32 = 2;
pub(super) const CONTROL: i32 = 3;
pub(super) const UNUSED: i32 = 5;
pub(super) const BYTE: i32 = 6;
/// `TrainerSpec.ModelType`
const BPE: u64 = 2;

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Token {
    pub(super) text: String,
    pub(super) score: f32,
    pub(super) kind: i32,
}

/// Field of a message.
enum Field<'a> {
    Varint(u64),
    Fixed32([u8; 4]),
    Bytes(&'a [u8]),
    Other,
}

/// Reads the pieces of a vocabulary.
pub(super) fn pieces(bytes: &[u8]) -> Result<Vec<Token>, &'static str> {
    let broken = "no SentencePiece vocabulary, or cut off";
    let (mut pieces, mut model_type) = (Vec::new(), 1);
    for field in fields(bytes) {
        match field.ok_or(broken)? {
            (1, Field::Bytes(piece)) => pieces.push(token(piece).ok_or(broken)?),
            (2, Field::Bytes(trainer)) => {
                for field in fields(trainer) {
                    if let (3, Field::Varint(value)) = field.ok_or(broken)? {
                        model_type = value;
                    }
                }
            }
            _ => {}
        }
    }
    match (model_type, pieces.is_empty()) {
        (_, true) => Err("a SentencePiece vocabulary without pieces"),
        (BPE, _) => Ok(pieces),
        _ => Err("a SentencePiece vocabulary that is not of byte pairs; only those are read"),
    }
}

fn token(bytes: &[u8]) -> Option<Token> {
    let mut token = Token {
        text: String::new(),
        score: 0.0,
        kind: 1,
    };
    for field in fields(bytes) {
        match field? {
            (1, Field::Bytes(text)) => std::str::from_utf8(text).ok()?.clone_into(&mut token.text),
            (2, Field::Fixed32(score)) => token.score = f32::from_le_bytes(score),
            // User-defined pieces are stored as normal ones.
            (3, Field::Varint(kind)) => {
                let kind = i32::try_from(kind).ok()?;
                let kept = [UNKNOWN, CONTROL, UNUSED, BYTE].contains(&kind);
                token.kind = if kept { kind } else { 1 };
            }
            _ => {}
        }
    }
    Some(token)
}

/// Numbers and contents of a message's fields. After a broken one, `None`, there are no others.
fn fields(bytes: &[u8]) -> impl Iterator<Item = Option<(u64, Field<'_>)>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let read = field(rest);
        rest = match &read {
            Some((_, _, after)) => *after,
            None => &[],
        };
        Some(read.map(|(number, field, _)| (number, field)))
    })
}

/// First field of a message: its number, its content, and the rest of the bytes.
fn field(bytes: &[u8]) -> Option<(u64, Field<'_>, &[u8])> {
    let (tag, rest) = varint(bytes)?;
    let (field, rest) = match tag & 7 {
        0 => varint(rest).map(|(value, rest)| (Field::Varint(value), rest))?,
        1 => (Field::Other, rest.get(8..)?),
        2 => {
            let (len, rest) = varint(rest)?;
            let (content, rest) = rest.split_at_checked(usize::try_from(len).ok()?)?;
            (Field::Bytes(content), rest)
        }
        5 => {
            let (value, rest) = rest.split_first_chunk::<4>()?;
            (Field::Fixed32(*value), rest)
        }
        _ => return None,
    };
    Some((tag >> 3, field, rest))
}

fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0u64;
    for (index, byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f).checked_shl(7 * index as u32)?;
        if byte & 0x80 == 0 {
            return Some((value, bytes.get(index + 1..)?));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(text: &str, score: f32, kind: u8) -> Vec<u8> {
        let mut inner = vec![0x0a, text.len() as u8];
        inner.extend(text.as_bytes());
        inner.push(0x15);
        inner.extend(score.to_le_bytes());
        inner.extend([0x18, kind]);
        let mut out = vec![0x0a, inner.len() as u8];
        out.extend(inner);
        out
    }

    #[test]
    fn pieces_are_read_with_their_scores_and_kinds() {
        let mut bytes = [
            piece("<unk>", 0.0, 2),
            piece("▁a", -1.5, 1),
            piece("x", -2.0, 4),
        ]
        .concat();
        bytes.extend([0x12, 2, 0x18, 2]);
        let read = pieces(&bytes).unwrap();
        let shown: Vec<_> = read
            .iter()
            .map(|t| (t.text.as_str(), t.score, t.kind))
            .collect();
        assert_eq!(shown, [("<unk>", 0.0, 2), ("▁a", -1.5, 1), ("x", -2.0, 1)]);
        for cut in 1..bytes.len() {
            // Truncated input yields at most three pieces, and no panic.
            if let Ok(read) = pieces(&bytes[..cut]) {
                assert!(read.len() <= 3);
            }
        }
    }

    #[test]
    fn other_algorithms_are_refused() {
        let bytes = piece("a", 0.0, 1);
        assert!(pieces(&bytes).unwrap_err().contains("byte pairs"));
        assert!(pieces(&[0xff; 40]).is_err());
    }
}
