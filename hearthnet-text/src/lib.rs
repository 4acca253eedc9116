//! Words of others, made fit to be shown.
//!
//! Names, codes, error messages and endpoints come from peers, strings from model files, and a host
//! can make any token appear in an answer. On a terminal, in a log or in an error they could move
//! the cursor, forge lines, hide behind characters without width, or turn the direction of
//! writing. So whatever shows such words lets only these characters through (an allow-list): those
//! that Rust's own `Debug` of a string shows as they are, which are all assigned characters of
//! Unicode but controls, formats, private use and line separators; and spaces of any width.
//!
//! | function | for | what is not let through |
//! |---|---|---|
//! | [`tame`] | one line: names, messages, log records | is escaped, so that it is seen |
//! | [`tame_name`] | a name in a table or a sentence | is left out; white space becomes one space |
//! | [`tame_text`] | a text for people: answers, tables | is left out; line ends and tabs stay |

use std::borrow::Cow;

/// Whether a character takes its place on a line and does nothing else. Marks that belong to the
/// character before them are.
pub fn is_plain(c: char) -> bool {
    match c {
        ' '..='~' => true,
        // Invisible, though they count as letters, symbols or marks: fillers, and selectors that
        // can carry a hidden message. The two selectors of emoji (FE0E, FE0F) are in daily use.
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

/// Whether `Debug` of a string shows it as it is. Behind another character: alone, a mark is escaped.
fn shown_as_it_is(c: char) -> bool {
    let mut bytes = [b'x'; 5];
    let len = bytes
        .get_mut(1..)
        .map_or(0, |rest| c.encode_utf8(rest).len());
    let text = bytes.get(..=len).and_then(|text| str::from_utf8(text).ok());
    text.is_some_and(|text| text.escape_debug().count() == 2)
}

/// One line, with every character that is not [plain](is_plain) escaped as in Rust (`\n`, `\u{1b}`).
pub fn tame(line: &str) -> Cow<'_, str> {
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

/// Whether a character may stand in a text of several lines: plain ones, line ends, tabs, and the
/// joiners without which Persian, Hindi and families of emoji are not spelled right.
pub fn is_plain_in_text(c: char) -> bool {
    matches!(c, '\n' | '\t' | '\u{200c}' | '\u{200d}') || is_plain(c)
}

/// A text without the characters that may [not stand in one](is_plain_in_text).
pub fn tame_text(text: &str) -> Cow<'_, str> {
    match text.chars().all(is_plain_in_text) {
        true => Cow::Borrowed(text),
        false => Cow::Owned(text.chars().filter(|c| is_plain_in_text(*c)).collect()),
    }
}

/// Whether a character can be seen by itself.
fn is_visible(c: char) -> bool {
    // The selectors of emoji only change the character before them.
    is_plain(c) && !c.is_whitespace() && !matches!(c, '\u{fe0e}' | '\u{fe0f}')
}

/// A name without the characters that may [not stand in a text](is_plain_in_text), with runs of white
/// space as one space and none at its ends, so that it cannot imitate the cells of a table. Empty if
/// nothing of it can be seen.
pub fn tame_name(name: &str) -> Cow<'_, str> {
    let is_single = |c: char| c == ' ' || (is_plain_in_text(c) && !c.is_whitespace());
    let shows = name.chars().any(is_visible);
    let is_trimmed = !name.starts_with(' ') && !name.ends_with(' ') && !name.contains("  ");
    if shows && is_trimmed && name.chars().all(is_single) {
        return Cow::Borrowed(name);
    }
    let words = name.split_whitespace().map(tame_text);
    let words = words.filter(|word| word.chars().any(is_visible));
    Cow::Owned(words.collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn words_of_all_scripts_are_shown_as_they_are() {
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
            assert!(matches!(tame(words), Cow::Borrowed(_)), "{words}");
            assert!(matches!(tame_text(words), Cow::Borrowed(_)), "{words}");
        }
        let persian = "\u{645}\u{6cc}\u{200c}\u{62e}\u{648}\u{627}\u{647}\u{645}";
        assert_eq!(tame_text(persian), persian);
    }

    #[test]
    fn what_moves_hides_or_forges_is_escaped_on_a_line_and_left_out_of_a_text() {
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
            assert_eq!(tame(raw), line);
            assert_eq!(tame_text(raw), text);
        }
    }

    #[test]
    fn a_name_that_shows_nothing_is_empty_and_white_space_imitates_no_table() {
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
            assert_eq!(tame_name(nothing), "", "{nothing:?}");
        }
        assert_eq!(tame_name(&format!("K{tags}im")), "Kim");
        assert_eq!(tame_name(&format!("Kim {tags} B")), "Kim B");
        assert_eq!(
            tame_name("  Kim   anchor\u{2003}\u{3000}online\n"),
            "Kim anchor online"
        );
        for name in [
            "Kim",
            "Elm Street 4",
            "\u{6a9}\u{200c}\u{6cc}",
            "\u{2764}\u{fe0f}",
        ] {
            assert!(matches!(tame_name(name), Cow::Borrowed(_)), "{name}");
        }
    }

    /// Characters that a terminal or an editor acts upon, as Unicode and ECMA-48 name them.
    fn acts(c: char) -> bool {
        c.is_control()
            || matches!(c,
                '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}')
    }

    proptest! {
        #[test]
        fn whatever_comes_nothing_that_acts_goes_out(raw in any::<String>()) {
            prop_assert!(!tame(&raw).chars().any(acts));
            let joiner = |c: char| matches!(c, '\n' | '\t' | '\u{200c}' | '\u{200d}');
            prop_assert!(!tame_text(&raw).chars().any(|c| acts(c) && !joiner(c)));
        }

        #[test]
        fn taming_twice_changes_nothing_more(raw in any::<String>()) {
            let (line, text, name) = (tame(&raw), tame_text(&raw), tame_name(&raw));
            prop_assert_eq!(&tame_name(&name), &name);
            prop_assert!(!name.contains("  ") && name.trim() == name);
            prop_assert_eq!(&tame(&line), &line);
            prop_assert_eq!(&tame_text(&text), &text);
        }
    }

    #[test]
    fn every_character_is_let_through_or_not_for_a_reason() {
        let plain = (0..=0x10_ffff)
            .filter_map(char::from_u32)
            .filter(|c| is_plain(*c));
        assert!(!plain.clone().any(acts));
        // Some 155,000 are assigned as of Unicode 16, most of them letters.
        assert!(plain.count() > 140_000);
    }
}
