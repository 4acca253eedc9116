//! Text on a terminal: cut at words, and nothing in it that a terminal would obey. Pure.

use hearthnet_text::is_plain_in_text;
use unicode_width::UnicodeWidthChar as _;

/// Columns that a tab goes on to a multiple of.
const TAB: usize = 8;

/// Puts line ends between the words of a text that comes in pieces, so that no word is cut by the
/// edge of the terminal. A word is shown when it is whole, so whatever else is written meanwhile
/// is never in the middle of one; a word that is longer than a line is left to the terminal.
///
/// What comes out is what went in, [tamed](hearthnet_text), and with some spaces turned into line
/// ends: copied text has no others added.
#[derive(Debug, Default)]
pub(crate) struct Wrap {
    /// Columns of the line that are taken.
    column: usize,
    /// Spaces behind them that the next word brings along, if it fits.
    spaces: String,
    word: String,
    word_width: usize,
    /// Whether this line began because the last one was full.
    cut: bool,
    /// Whether what was written last may be cut off from what follows, space or not.
    after_wide: bool,
}

impl Wrap {
    /// What can be shown of the text so far, on lines of `width` columns (at least 1).
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
                    // Scripts that are written without spaces may be cut at every character.
                    let alone = columns > 1;
                    if alone {
                        self.end_word(width, &mut out);
                    }
                    self.word.push(c);
                    self.word_width += columns;
                    // Longer than any line: to wait for its end would hold it back for nothing.
                    if alone || self.word_width >= width {
                        self.end_word(width, &mut out);
                    }
                }
            }
        }
        out
    }

    /// The rest: the last word.
    pub(crate) fn finish(&mut self, width: usize) -> String {
        let mut out = String::new();
        self.end_word(width.max(1), &mut out);
        self.spaces.clear();
        out
    }

    /// Whether the cursor is at the beginning of a line.
    pub(crate) fn at_start(&self) -> bool {
        self.column == 0
    }

    /// Something else has been written, and the cursor is at the beginning of a line.
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
            // Spaces at the beginning of a line are the text's own, unless we began it.
            out.push_str(&self.spaces);
            self.column = column;
        }
        out.push_str(&self.word);
        self.after_wide = wide(self.word.chars().next_back());
        self.column += self.word_width;
        if self.column > width {
            // The terminal has cut it.
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
    fn a_word_that_fits_on_no_line_is_left_whole_for_whoever_copies_it() {
        assert_eq!(
            wrapped("see http://a.example/b now", 8),
            "see\nhttp://a.example/b now"
        );
        assert_eq!(wrapped("0123456789", 4), "0123456789");
    }

    #[test]
    fn wide_characters_take_two_columns_and_may_be_cut_anywhere() {
        let mut wrap = Wrap::default();
        // Nothing is held back although there is no space.
        assert_eq!(wrap.push("日本語", 4), "日本\n語");
        assert_eq!(wrapped("né\u{301} x", 4), "né\u{301} x");
    }

    #[test]
    fn a_word_is_shown_when_it_is_whole() {
        let mut wrap = Wrap::default();
        assert_eq!(wrap.push("Hel", 80), "");
        assert_eq!(wrap.push("lo wor", 80), "Hello");
        assert!(!wrap.at_start());
        // A notice was written on a line of its own.
        wrap.interrupted();
        assert_eq!(wrap.push("ld.", 80) + &wrap.finish(80), "world.");
    }

    #[test]
    fn what_a_terminal_would_obey_is_left_out() {
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
        fn whatever_comes_nothing_but_text_goes_out(text in any::<String>(), width in 0_usize..20) {
            prop_assert!(wrapped(&text, width).chars().all(is_plain_in_text));
        }
    }
}
