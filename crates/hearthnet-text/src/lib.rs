//! Sanitises untrusted text for display.
//!
//! Names, codes, error messages and endpoints come from peers, strings from model files, and a host
//! can make any token appear in an answer. On a terminal, in a log or in an error they could move
//! the cursor, forge lines, hide behind zero-width characters, or change the writing direction. So
//! every output of such text uses an allow-list: the characters that Rust's own `Debug` of a string
//! shows unchanged, and spaces of any width. These are all assigned Unicode characters except
//! controls, formats, private use and line separators.
//!
//! | function | for | other characters |
//! |---|---|---|
//! | [`sanitize`] | one line: names, messages, log records | are escaped, so that they are visible |
//! | [`sanitize_name`] | a name in a table or a sentence | are removed; white space becomes one space |
//! | [`sanitize_text`] | a text for people: answers, tables | are removed; line ends and tabs stay |

use std::borrow::Cow;

/// True for a character that only takes its place on a line, including combining marks.
pub fn is_plain(c: char) -> bool {
    match c {
        ' '..='~' => true,
        // Invisible, although letters, symbols or marks: fillers, and selectors that can carry a
        // hidden message. The two emoji selectors (FE0E, FE0F) are in common use and allowed.
        '\u{34f}'
        | '\u{115f}'
        | '\u{1160}'
        | '\u{17b4}'
        | '\u{17b5}'
        | '\u{2800}'
        | '\u{3164}'
        | '\u{ffa0}'
        | '\u{180b}'..='\u{180d}'
        | '\u{180f}'
        | '\u{fe00}'..='\u{fe0d}'
        | '\u{e0100}'..='\u{e01ef}' => false,
        '\u{85}' | '\u{2028}' | '\u{2029}' => false,
        c if c.is_whitespace() => !c.is_control(),
        c => shown_as_it_is(c),
    }
}

/// True if `Debug` of a string shows it unchanged. Tested after another character, because a mark
/// alone is escaped.
fn shown_as_it_is(c: char) -> bool {
    let mut bytes = [b'x'; 5];
    let len = bytes
        .get_mut(1..)
        .map_or(0, |rest| c.encode_utf8(rest).len());
    let text = bytes.get(..=len).and_then(|text| str::from_utf8(text).ok());
    text.is_some_and(|text| text.escape_debug().count() == 2)
}

/// Escapes every character of a line that is not [plain](is_plain), as Rust does (`\n`, `\u{1b}`).
pub fn sanitize(line: &str) -> Cow<'_, str> {
    if line.chars().all(is_plain) {
        return Cow::Borrowed(line);
    }
    let mut out = String::with_capacity(line.len());
    for c in line.chars() {
        match is_plain(c) {
            true => out.push(c),
            false => out.extend(c.escape_default()),
        }
    }
    Cow::Owned(out)
}

/// True for a character allowed in a text of several lines: plain ones, line ends, tabs, and the
/// joiners that Persian, Hindi and emoji families need.
pub fn is_plain_in_text(c: char) -> bool {
    matches!(c, '\n' | '\t' | '\u{200c}' | '\u{200d}') || is_plain(c)
}

/// Removes the characters that are not [allowed in a text](is_plain_in_text).
pub fn sanitize_text(text: &str) -> Cow<'_, str> {
    match text.chars().all(is_plain_in_text) {
        true => Cow::Borrowed(text),
        false => Cow::Owned(text.chars().filter(|c| is_plain_in_text(*c)).collect()),
    }
}

/// True if the character is visible by itself.
fn is_visible(c: char) -> bool {
    // The emoji selectors only change the character before them.
    is_plain(c) && !c.is_whitespace() && !matches!(c, '\u{fe0e}' | '\u{fe0f}')
}

/// Removes the characters that are not [allowed in a text](is_plain_in_text), and replaces runs of
/// white space by one space, none at the ends, so that a name cannot imitate the cells of a table.
/// Empty if no visible character is left.
pub fn sanitize_name(name: &str) -> Cow<'_, str> {
    let is_single = |c: char| c == ' ' || (is_plain_in_text(c) && !c.is_whitespace());
    let shows = name.chars().any(is_visible);
    let is_trimmed = !name.starts_with(' ') && !name.ends_with(' ') && !name.contains("  ");
    if shows && is_trimmed && name.chars().all(is_single) {
        return Cow::Borrowed(name);
    }
    let words = name.split_whitespace().map(sanitize_text);
    let words = words.filter(|word| word.chars().any(is_visible));
    Cow::Owned(words.collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn text_of_all_scripts_is_unchanged() {
        for words in [
            "Käse 🧀 \\ 'x' \"y\"",
            "e\u{301} n\u{303}",
            "\u{645}\u{631}\u{62d}\u{628}\u{627}",
            "\u{5e9}\u{5c1}\u{5dc}\u{5d5}\u{5dd}",
            "\u{928}\u{92e}\u{938}\u{94d}\u{924}\u{947}",
            "\u{4f60}\u{597d}\u{3000}\u{3053}",
            "12\u{202f}000\u{a0}\u{20ac}",
            "\u{2764}\u{fe0f}",
        ] {
            assert!(matches!(sanitize(words), Cow::Borrowed(_)), "{words}");
            assert!(matches!(sanitize_text(words), Cow::Borrowed(_)), "{words}");
        }
        let persian = "\u{645}\u{6cc}\u{200c}\u{62e}\u{648}\u{627}\u{647}\u{645}";
        assert_eq!(sanitize_text(persian), persian);
    }

    #[test]
    fn control_characters_are_escaped_on_a_line_and_removed_from_a_text() {
        for (raw, line, text) in [
            (
                "\u{1b}]0;title\u{7}x",
                "\\u{1b}]0;title\\u{7}x",
                "]0;titlex",
            ),
            (
                "a\u{1b}[2Jb\r\n\u{9b}c",
                "a\\u{1b}[2Jb\\r\\n\\u{9b}c",
                "a[2Jb\nc",
            ),
            ("x\u{202e}y\u{2066}z", "x\\u{202e}y\\u{2066}z", "xyz"),
            ("k\u{200b}im\u{feff}", "k\\u{200b}im\\u{feff}", "kim"),
            ("k\u{3164}im\u{34f}", "k\\u{3164}im\\u{34f}", "kim"),
            ("a\u{2028}b\u{85}c", "a\\u{2028}b\\u{85}c", "abc"),
            ("\u{e0041}\u{e0100}", "\\u{e0041}\\u{e0100}", ""),
            ("\u{e000}\u{ffff}\u{ad}", "\\u{e000}\\u{ffff}\\u{ad}", ""),
            ("a\tb", "a\\tb", "a\tb"),
        ] {
            assert_eq!(sanitize(raw), line);
            assert_eq!(sanitize_text(raw), text);
        }
    }

    #[test]
    fn an_invisible_name_is_empty_and_white_space_imitates_no_table() {
        let tags = "\u{e0041}\u{e006e}\u{e007f}";
        for nothing in [
            "",
            "   ",
            tags,
            "\u{200b}\u{2060}\u{feff}",
            "\u{3000}\u{a0}",
            "\u{200c}\u{200d}",
            "\u{fe0f}",
            "\u{3164} \u{2800}",
        ] {
            assert_eq!(sanitize_name(nothing), "", "{nothing:?}");
        }
        assert_eq!(sanitize_name(&format!("K{tags}im")), "Kim");
        assert_eq!(sanitize_name(&format!("Kim {tags} B")), "Kim B");
        assert_eq!(
            sanitize_name("  Kim   anchor\u{2003}\u{3000}online\n"),
            "Kim anchor online"
        );
        for name in [
            "Kim",
            "Elm Street 4",
            "\u{6a9}\u{200c}\u{6cc}",
            "\u{2764}\u{fe0f}",
        ] {
            assert!(matches!(sanitize_name(name), Cow::Borrowed(_)), "{name}");
        }
    }

    /// Control and format characters to which terminals or editors react, by Unicode and ECMA-48.
    fn acts(c: char) -> bool {
        c.is_control()
            || matches!(c,
                '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}')
    }

    proptest! {
        #[test]
        fn no_control_character_passes(raw in any::<String>()) {
            prop_assert!(!sanitize(&raw).chars().any(acts));
            let joiner = |c: char| matches!(c, '\n' | '\t' | '\u{200c}' | '\u{200d}');
            prop_assert!(!sanitize_text(&raw).chars().any(|c| acts(c) && !joiner(c)));
        }

        #[test]
        fn sanitizing_is_idempotent(raw in any::<String>()) {
            let (line, text, name) = (sanitize(&raw), sanitize_text(&raw), sanitize_name(&raw));
            prop_assert_eq!(&sanitize_name(&name), &name);
            prop_assert!(!name.contains("  ") && name.trim() == name);
            prop_assert_eq!(&sanitize(&line), &line);
            prop_assert_eq!(&sanitize_text(&text), &text);
        }
    }

    #[test]
    fn every_character_is_let_through_or_not_for_a_reason() {
        let plain = (0..=0x10_ffff)
            .filter_map(char::from_u32)
            .filter(|c| is_plain(*c));
        assert!(!plain.clone().any(acts));
        // About 155,000 characters are assigned as of Unicode 16, most of them letters.
        assert!(plain.count() > 140_000);
    }
}
