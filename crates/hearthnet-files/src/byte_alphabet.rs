//! Alphabet of byte-level BPE: one printable character for each of the 256 bytes.
//!
//! GPT-2's `bytes_to_unicode`: printable Latin-1 characters stand for themselves, the other 68
//! bytes take the characters from U+0100 on, in order. So a vocabulary writes a space as `Ġ`
//! (U+0120).

/// Characters by byte.
const CHARS: [char; 256] = {
    let mut chars = ['\0'; 256];
    let mut next = 0x100_u32;
    let mut byte = 0_usize;
    while byte < 256 {
        let code = if is_printable(byte as u8) {
            byte as u32
        } else {
            next += 1;
            next - 1
        };
        chars[byte] = match char::from_u32(code) {
            Some(c) => c,
            None => '\0', // Unreachable: every code is below U+0144.
        };
        byte += 1;
    }
    chars
};

const fn is_printable(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}

/// Character of `byte`.
pub fn char_of(byte: u8) -> char {
    CHARS[usize::from(byte)]
}

/// Byte of `c`; `None` for a character outside the alphabet.
pub fn byte_of(c: char) -> Option<u8> {
    let code = u32::from(c);
    match code {
        0..0x100 => u8::try_from(code).ok().filter(|&byte| is_printable(byte)),
        // 33 bytes up to the space, 34 from DEL to the no-break space, and the soft hyphen.
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character_and_comes_back() {
        let mut seen = std::collections::BTreeSet::new();
        for byte in 0..=255_u8 {
            assert!(seen.insert(char_of(byte)));
            assert_eq!(byte_of(char_of(byte)), Some(byte));
        }
        assert_eq!(
            (0..0x11_0000)
                .filter_map(char::from_u32)
                .filter_map(byte_of)
                .count(),
            256
        );
    }

    #[test]
    fn well_known_characters_stand_for_space_newline_and_tab() {
        assert_eq!(
            (char_of(b' '), char_of(b'\n'), char_of(b'\t')),
            ('Ġ', 'Ċ', 'ĉ')
        );
        assert_eq!((char_of(b'a'), char_of(0xff)), ('a', 'ÿ'));
    }
}
