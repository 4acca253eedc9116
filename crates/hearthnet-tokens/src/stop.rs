//! Stop strings end a generation, however tokens split them.

use std::fmt;

/// Limit of stop strings. OpenAI's API accepts four.
pub const MAX_STOPS: usize = 64;
/// Limit of a stop string's length, in bytes.
pub const MAX_STOP_BYTES: usize = 1024;

/// Why stop strings are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StopError {
    /// A string is empty, and would end the generation before the first token.
    #[error("stop string {0} is empty; leave it out")]
    Empty(usize),

    /// There are more than [`MAX_STOPS`].
    #[error("there are {0} stop strings; at most {MAX_STOPS} are accepted")]
    TooMany(usize),

    /// A string is longer than [`MAX_STOP_BYTES`].
    #[error("stop string {index} is {bytes} bytes long; at most {MAX_STOP_BYTES} are accepted")]
    TooLong {
        /// Position in the list, from 0.
        index: usize,
        /// Length of the string.
        bytes: usize,
    },
}

/// Result of a piece of text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct StopStep {
    /// Text that certainly precedes any stop string.
    pub emit: String,
    /// A stop string is complete: the generation is over.
    pub stopped: bool,
}

/// Searches a stream of text for stop strings.
///
/// Releases text as soon as it cannot begin a stop string; the stop string itself is never
/// released. The result depends only on the text, not on its division into pieces. The stop string
/// that *ends* first wins, so that no further tokens are generated. Among strings that end at the
/// same position, the one that begins first wins.
///
/// Every piece is compared with every stop string at each possible start. The held text is shorter
/// than the longest stop string, so the cost is small compared to computing a token.
#[derive(Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// Text that may begin a stop string.
    held: String,
    matched: Option<usize>,
}

/// Omits the text, so that it cannot enter a log.
impl fmt::Debug for StopMatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StopMatcher")
            .field("stops", &self.stops.len())
            .field("held_bytes", &self.held.len())
            .finish_non_exhaustive()
    }
}

impl StopMatcher {
    /// Matcher for `stops`; with an empty list it releases all text at once.
    ///
    /// # Errors
    /// [`StopError`] for empty, too many or too long strings.
    pub fn new(stops: Vec<String>) -> Result<Self, StopError> {
        if stops.len() > MAX_STOPS {
            return Err(StopError::TooMany(stops.len()));
        }
        for (index, stop) in stops.iter().enumerate() {
            if stop.is_empty() {
                return Err(StopError::Empty(index));
            }
            if stop.len() > MAX_STOP_BYTES {
                let bytes = stop.len();
                return Err(StopError::TooLong { index, bytes });
            }
        }
        Ok(Self {
            stops,
            held: String::new(),
            matched: None,
        })
    }

    /// Adds the next piece. After a stop string, all text is dropped.
    pub fn push(&mut self, piece: &str) -> StopStep {
        if self.matched.is_some() {
            return StopStep {
                emit: String::new(),
                stopped: true,
            };
        }
        for c in piece.chars() {
            self.held.push(c);
            let ends = |(_, stop): &(usize, &String)| self.held.ends_with(stop.as_str());
            let complete = self.stops.iter().enumerate().filter(ends);
            // The longest began first; among equal strings, the first in the list counts.
            if let Some((index, stop)) = complete.rev().max_by_key(|(_, stop)| stop.len()) {
                self.matched = Some(index);
                let mut emit = std::mem::take(&mut self.held);
                emit.truncate(emit.len().saturating_sub(stop.len()));
                return StopStep {
                    emit,
                    stopped: true,
                };
            }
        }
        let begins = |at: &usize| {
            let rest = self.held.get(*at..).unwrap_or_default();
            self.stops.iter().any(|stop| stop.starts_with(rest))
        };
        let mut places = self.held.char_indices().map(|(at, _)| at);
        let keep_from = places.find(begins).unwrap_or(self.held.len());
        StopStep {
            emit: self.held.drain(..keep_from).collect(),
            stopped: false,
        }
    }

    /// Returns the held text at the end of the stream: it begins a stop string but does not
    /// complete it.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Stop string that ended the generation.
    pub fn matched(&self) -> Option<&str> {
        self.stops.get(self.matched?).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(stops.iter().map(|stop| (*stop).to_owned()).collect()).unwrap()
    }

    /// Pushes the pieces; returns the released text and the stop string that was found.
    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let mut matcher = matcher(stops);
        let mut text = String::new();
        for piece in pieces {
            text.push_str(&matcher.push(piece).emit);
        }
        text.push_str(&matcher.finish());
        (text, matcher.matched().map(str::to_owned))
    }

    fn assert_run(stops: &[&str], pieces: &[&str], text: &str, stop: &str) {
        assert_eq!(run(stops, pieces), (text.to_owned(), Some(stop.to_owned())));
    }

    /// Reference implementation on the whole text.
    fn naive(stops: &[&str], text: &str) -> (String, Option<String>) {
        for end in 0..=text.len() {
            let ending = stops
                .iter()
                .filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()));
            if let Some(stop) = ending.max_by_key(|stop| stop.len()) {
                return (
                    text[..end - stop.len()].to_owned(),
                    Some((*stop).to_owned()),
                );
            }
        }
        (text.to_owned(), None)
    }

    #[test]
    fn a_stop_string_is_found_across_pieces_and_never_shown() {
        assert_run(
            &["\nUser:"],
            &["Hi.", "\n", "Us", "er", ": more"],
            "Hi.",
            "\nUser:",
        );
        assert_run(&["END"], &["a E", "N", "x EN", "D b"], "a ENx ", "END");
        assert_run(&["aab"], &["aa", "aa", "b"], "aa", "aab");
    }

    #[test]
    fn only_text_that_may_begin_a_stop_string_is_held() {
        let mut matcher = matcher(&["<end>", "###"]);
        assert_eq!(matcher.push("abc").emit, "abc");
        assert_eq!(matcher.push("d<e").emit, "d");
        assert_eq!(matcher.push("x#").emit, "<ex");
        assert_eq!(matcher.push("#").emit, "");
        assert_eq!(matcher.push(" #").emit, "## ");
        assert_eq!(matcher.finish(), "#");
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn the_stop_string_that_ends_first_wins_and_then_the_one_that_begins_first() {
        assert_run(&["abcd", "bc"], &["xabcd"], "xa", "bc");
        assert_run(&["bc", "abc"], &["xabcd"], "x", "abc");
    }

    #[test]
    fn no_text_is_released_after_the_stop() {
        let mut matcher = matcher(&["."]);
        for (piece, emit) in [("One. Two.", "One"), ("Three", "")] {
            let step = matcher.push(piece);
            assert_eq!((step.emit.as_str(), step.stopped), (emit, true));
        }
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn unusable_stop_strings_are_refused() {
        let new =
            |stops: &[&str]| StopMatcher::new(stops.iter().map(|s| (*s).to_owned()).collect());
        assert_eq!(new(&["a", ""]).unwrap_err(), StopError::Empty(1));
        assert_eq!(new(&["a"; 65]).unwrap_err(), StopError::TooMany(65));
        let long = "x".repeat(1025);
        assert_eq!(
            new(&[&long]).unwrap_err(),
            StopError::TooLong {
                index: 0,
                bytes: 1025
            }
        );
        assert!(new(&[]).is_ok());
    }

    fn stops() -> impl Strategy<Value = Vec<String>> {
        prop::collection::vec("[abé🙂]{1,5}", 0..4)
    }

    proptest! {
        #[test]
        fn the_result_does_not_depend_on_how_the_text_is_cut(
            stops in stops(),
            pieces in prop::collection::vec("[abéê🙂😀]{0,4}", 0..12),
        ) {
            let stops: Vec<_> = stops.iter().map(String::as_str).collect();
            let pieces: Vec<_> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&stops, &pieces), naive(&stops, &pieces.concat()));
        }

        #[test]
        fn held_text_could_begin_a_stop_string(
            stops in stops(),
            pieces in prop::collection::vec("[abéê🙂😀]{0,4}", 0..12),
        ) {
            let names: Vec<_> = stops.iter().map(String::as_str).collect();
            let mut matcher = matcher(&names);
            let (mut all, mut given) = (String::new(), String::new());
            for piece in &pieces {
                all.push_str(piece);
                let step = matcher.push(piece);
                given.push_str(&step.emit);
                if step.stopped {
                    break;
                }
                let held = all.strip_prefix(given.as_str()).unwrap();
                let begins = |text: &str| names.iter().any(|stop| stop.starts_with(text));
                prop_assert!(held.is_empty() || begins(held), "held {:?} of {:?}", held, all);
            }
        }
    }
}
