//! Stand-in characters that keep message text apart from control tokens.

use std::collections::{HashMap, HashSet};

/// Stand-ins: the second private use plane, without its two noncharacters.
const STAND_INS: std::ops::RangeInclusive<char> = '\u{100000}'..='\u{10fffd}';

/// Replaces characters by stand-ins, one for one, and back. White space and lengths are unchanged,
/// so templates trim and measure shielded text as they would the original.
#[derive(Debug)]
pub(super) struct Shield {
    stand_ins: HashMap<char, char>,
    originals: HashMap<char, char>,
}

impl Shield {
    /// Shield for `chars`. Its stand-ins occur neither in them nor in `texts`; `None` if there are
    /// not enough.
    pub(super) fn new<'a>(
        chars: &[char],
        texts: impl IntoIterator<Item = &'a str>,
    ) -> Option<Self> {
        let taken: HashSet<char> = texts
            .into_iter()
            .flat_map(str::chars)
            .chain(chars.iter().copied())
            .filter(|c| STAND_INS.contains(c))
            .collect();
        let free = STAND_INS.filter(|c| !taken.contains(c));
        let stand_ins: HashMap<_, _> = chars.iter().copied().zip(free).collect();
        if stand_ins.len() < chars.len() {
            return None;
        }
        let originals = stand_ins
            .iter()
            .map(|(original, stand_in)| (*stand_in, *original));
        Some(Self {
            originals: originals.collect(),
            stand_ins,
        })
    }

    /// Text with stand-ins.
    pub(super) fn apply(&self, text: &str) -> String {
        swap(&self.stand_ins, text)
    }

    /// Text with the original characters.
    pub(super) fn undo(&self, text: &str) -> String {
        swap(&self.originals, text)
    }
}

fn swap(by: &HashMap<char, char>, text: &str) -> String {
    text.chars()
        .map(|c| by.get(&c).copied().unwrap_or(c))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_shield_is_refused_when_the_stand_ins_run_out() {
        let all: String = STAND_INS.collect();
        assert!(Shield::new(&['<'], [&*all]).is_none());
        assert!(Shield::new(&[], [&*all]).is_some());
    }

    proptest! {
        #[test]
        fn undoing_gives_the_text_back_even_if_it_uses_the_same_private_characters(
            text in "[<|>a-z \u{100000}-\u{100010}]{0,40}",
        ) {
            let shield = Shield::new(&['<', '|', '>', 'e'], [&*text]).unwrap();
            let shielded = shield.apply(&text);
            prop_assert!(!shielded.contains(['<', '|', '>', 'e']));
            prop_assert_eq!(shield.undo(&shielded), text);
        }
    }
}
