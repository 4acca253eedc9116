//! Text on a terminal: wrapped at words, and sanitized. Pure.

use hearthnet_text::is_plain_in_text;
use unicode_width::UnicodeWidthChar as _;

const TAB: usize = 8;

/// Wraps streamed text between words, so that the terminal's edge cuts no word. A word is shown
/// when it is complete, so that other output never appears inside it. A word longer than a line is
/// left to the terminal.
///
/// The output is the [sanitized](hearthnet_text) input, with some spaces replaced by newlines, so
/// that copied text has no additional characters.
#[derive(Debug, Default)]
pub(crate) struct Wrap {
    /// Occupied columns of the line.
    column: usize,
    /// Spaces before the next word, if it fits on the line.
    spaces: String,
    word: String,
    word_width: usize,
    /// Whether this line started because the previous one was full.
    cut: bool,
    /// Whether a line may break after the last output even without a space.
    after_wide: bool,
}

impl Wrap {
    /// Returns the text that can be shown now, on lines of `width` columns (at least 1).
    pub(crate) fn push(&mut self, text: &str, width: usize) -> String {
        let width = width.max(1);
        let mut out = String::new();
        for c in text.chars().filter(|c| is_plain_in_text(*c)) {
            match c {
                '\n' => {
                    self.end_word(width, &mut out);
                    self.spaces.clear();
                    out.push('\n');
                    (self.column, self.cut) = (0, false);
                }
                ' ' | '\t' => {
                    self.end_word(width, &mut out);
                    self.spaces.push(c);
                }
                c => {
                    let columns = char::width(c).unwrap_or(0);
                    // Scripts without spaces may be broken at every character.
                    let alone = columns > 1;
                    if alone {
                        self.end_word(width, &mut out);
                    }
                    self.word.push(c);
                    self.word_width += columns;
                    // Longer than any line: waiting for its end would only delay it.
                    if alone || self.word_width >= width {
                        self.end_word(width, &mut out);
                    }
                }
            }
        }
        out
    }

    /// Returns the last word.
    pub(crate) fn finish(&mut self, width: usize) -> String {
        let mut out = String::new();
        self.end_word(width.max(1), &mut out);
        self.spaces.clear();
        out
    }

    pub(crate) fn at_start(&self) -> bool {
        self.column == 0
    }

    /// Other output was written, and the cursor is at the start of a line.
    pub(crate) fn interrupted(&mut self) {
        (self.column, self.cut) = (0, true);
    }

    fn end_word(&mut self, width: usize, out: &mut String) {
        if self.word.is_empty() {
            return;
        }
        let mut column = self.column;
        for space in self.spaces.chars() {
            column += match space {
                '\t' => TAB - column % TAB,
                _ => 1,
            };
        }
        let wide = |c: Option<char>| c.and_then(char::width).is_some_and(|columns| columns > 1);
        let between = !self.spaces.is_empty() || self.after_wide || wide(self.word.chars().next());
        if self.column > 0 && column + self.word_width > width && between {
            out.push('\n');
            (self.column, self.cut) = (0, true);
        } else if self.column > 0 || !self.cut {
            // Leading spaces belong to the text, unless the line started with a break.
            out.push_str(&self.spaces);
            self.column = column;
        }
        out.push_str(&self.word);
        self.after_wide = wide(self.word.chars().next_back());
        self.column += self.word_width;
        if self.column > width {
            // The terminal has wrapped it.
            self.column = (self.column - 1) % width + 1;
        }
        self.spaces.clear();
        self.word.clear();
        self.word_width = 0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn wrapped(text: &str, width: usize) -> String {
        let mut wrap = Wrap::default();
        wrap.push(text, width) + &wrap.finish(width)
    }

    #[test]
    fn lines_end_between_words() {
        assert_eq!(wrapped("one two three", 7), "one two\nthree");
        assert_eq!(wrapped("one two three", 6), "one\ntwo\nthree");
        assert_eq!(wrapped("one  two", 80), "one  two");
        assert_eq!(wrapped("  code\n    more", 80), "  code\n    more");
        assert_eq!(wrapped("a b\n\nc", 3), "a b\n\nc");
        assert_eq!(wrapped("a\tb", 80), "a\tb");
        assert_eq!(wrapped("a\tb", 8), "a\nb");
    }

    #[test]
    fn a_word_longer_than_a_line_is_not_broken() {
        assert_eq!(
            wrapped("see http://a.example/b now", 8),
            "see\nhttp://a.example/b now"
        );
        assert_eq!(wrapped("0123456789", 4), "0123456789");
    }

    #[test]
    fn wide_characters_take_two_columns_and_may_be_cut_anywhere() {
        let mut wrap = Wrap::default();
        // Wide characters are not held back, although there is no space.
        assert_eq!(wrap.push("日本語", 4), "日本\n語");
        assert_eq!(wrapped("né\u{301} x", 4), "né\u{301} x");
    }

    #[test]
    fn a_word_is_shown_when_it_is_whole() {
        let mut wrap = Wrap::default();
        assert_eq!(wrap.push("Hel", 80), "");
        assert_eq!(wrap.push("lo wor", 80), "Hello");
        assert!(!wrap.at_start());
        // A notice was written on its own line.
        wrap.interrupted();
        assert_eq!(wrap.push("ld.", 80) + &wrap.finish(80), "world.");
    }

    #[test]
    fn control_characters_are_removed() {
        let evil = "a\u{1b}[2Jb\u{9b}31mc\rd\u{7}e\u{202e}f\u{0}\u{7f}g";
        assert_eq!(wrapped(evil, 80), "a[2Jb31mcdefg");
    }

    proptest! {
        #[test]
        fn no_letter_is_lost_and_no_line_of_short_words_is_too_long(
            words in prop::collection::vec("[a-zé]{1,9}|日|\\n", 0..60),
            width in 10_usize..40, cuts in 1_usize..7,
        ) {
            let text = words.join(" ");
            let mut wrap = Wrap::default();
            let mut out = String::new();
            let letters: Vec<char> = text.chars().collect();
            for piece in letters.chunks(cuts) {
                out += &wrap.push(&piece.iter().collect::<String>(), width);
            }
            out += &wrap.finish(width);
            let bare = |text: &str| text.split_whitespace().collect::<String>();
            prop_assert_eq!(bare(&out), bare(&text));
            for line in out.lines() {
                prop_assert!(unicode_width::UnicodeWidthStr::width(line) <= width, "{:?}", line);
            }
            prop_assert_eq!(wrapped(&text, width), out, "however it is cut into pieces");
        }

        #[test]
        fn any_input_yields_only_plain_text(text in any::<String>(), width in 0_usize..20) {
            prop_assert!(wrapped(&text, width).chars().all(is_plain_in_text));
        }
    }
}
