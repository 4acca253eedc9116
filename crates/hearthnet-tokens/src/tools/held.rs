//! Text that is held back until it is known whether it begins a mark. Pure.

pub(super) fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\n')
}

pub(super) fn skip_space(held: &mut String) {
    let space = held.len() - held.trim_start_matches(is_space).len();
    held.drain(..space);
}

/// Whether a text, to which more may be added, begins with another text.
pub(super) enum Begins {
    With,
    /// It may, once more of it is known.
    May,
    No,
}

pub(super) fn begins(text: &str, with: &str) -> Begins {
    match (text.starts_with(with), with.starts_with(text)) {
        (true, _) => Begins::With,
        (false, true) => Begins::May,
        (false, false) => Begins::No,
    }
}

/// Removes white space and a text behind it, if the text is there.
pub(super) fn expect(held: &mut String, part: &str) -> Begins {
    let text = held.trim_start_matches(is_space);
    let part = part.trim_start_matches(is_space);
    let found = begins(text, part);
    if let Begins::With = found {
        let to = held.len() - text.len() + part.len();
        held.drain(..to);
    }
    found
}

/// Number of bytes before any text that may become the mark.
pub(super) fn sure(held: &str, mark: &str) -> usize {
    let may = |at: &usize| mark.starts_with(held.get(*at..).unwrap_or_default());
    let mut places = held.char_indices().map(|(at, _)| at);
    places.find(may).unwrap_or(held.len())
}

/// Text that is certainly before the mark.
pub(super) fn head<'a>(held: &'a str, mark: &str) -> &'a str {
    held.get(..sure(held, mark)).unwrap_or_default()
}

/// Moves the text before a mark to `out`, and removes the mark. White space before the mark is not
/// part of the text. Returns whether the mark was there.
pub(super) fn take_before(held: &mut String, mark: &str, out: &mut String) -> bool {
    let found = held.find(mark);
    let text = match found {
        Some(at) => held.get(..at).unwrap_or_default(),
        None => head(held, mark),
    };
    let text = text.trim_end_matches(is_space);
    out.push_str(text);
    let used = found.map_or(text.len(), |at| at + mark.len());
    held.drain(..used);
    found.is_some()
}
