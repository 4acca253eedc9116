//! Serde helpers for fields of control bodies: codes, and texts of limited length.

use serde::{Deserialize, Deserializer, Serializer, de};

use crate::code::Code;

/// The longest prefix of at most `max` bytes that does not split a character.
fn cut(text: &str, max: usize) -> &str {
    let end = text.floor_char_boundary(max);
    text.get(..end).unwrap_or_default()
}

/// Writes at most `MAX` bytes of a text.
pub(crate) fn write_cut<const MAX: usize, S: Serializer>(
    text: &str,
    to: S,
) -> Result<S::Ok, S::Error> {
    to.serialize_str(cut(text, MAX))
}

/// Reads a text of at most `MAX` bytes.
pub(crate) fn text<'de, const MAX: usize, D: Deserializer<'de>>(
    from: D,
) -> Result<String, D::Error> {
    let text = String::deserialize(from)?;
    match text.len() <= MAX {
        true => Ok(text),
        false => Err(de::Error::custom("a text is too long")),
    }
}

/// Reads a [`Code`].
pub(crate) fn code<'de, D: Deserializer<'de>>(from: D) -> Result<Code, D::Error> {
    let text = String::deserialize(from)?;
    Code::parse(&text).ok_or_else(|| de::Error::custom("not the name of a failure"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters() {
        assert_eq!(cut("grün", 3), "gr");
        assert_eq!(cut("grün", 4), "grü");
        assert_eq!(cut("grün", 400), "grün");
    }
}
