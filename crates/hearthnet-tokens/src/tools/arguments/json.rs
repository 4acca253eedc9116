//! JSON values in the text of a model, and texts as JSON.

use serde_json::Value;

use super::form::Read;

/// Position in a JSON value.
#[derive(Clone, Default)]
pub(in crate::tools) struct JsonScan {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl JsonScan {
    /// Moves the next part of the value. A number or word is moved as a whole.
    pub(super) fn read(&mut self, held: &mut String, json: &mut String) -> Read {
        if self.depth == 0 && !self.in_string {
            let space = held.len() - held.trim_start().len();
            held.drain(..space);
            match held.chars().next() {
                None => return Read::More,
                Some('{' | '[' | '"') => {}
                Some(_) => return word(held, json),
            }
        }
        let mut end = None;
        for (at, c) in held.char_indices() {
            match (self.in_string, c) {
                (true, _) if self.escaped => self.escaped = false,
                (true, '\\') => self.escaped = true,
                (_, '"') => self.in_string = !self.in_string,
                (false, '{' | '[') => self.depth += 1,
                (false, '}' | ']') => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
            if self.depth == 0 && !self.in_string {
                end = Some(at + c.len_utf8());
                break;
            }
        }
        json.extend(held.drain(..end.unwrap_or(held.len())));
        match end {
            Some(_) => Read::Done,
            None => Read::More,
        }
    }
}

/// Moves a number or word, which ends before a mark or white space.
pub(super) fn word(held: &mut String, json: &mut String) -> Read {
    let ends = |c: char| c.is_whitespace() || matches!(c, ',' | '}' | ']' | ')' | '<');
    let Some(end) = held.find(ends) else {
        return Read::More;
    };
    if end == 0 {
        return Read::Broken;
    }
    let word: String = held.drain(..end).collect();
    *json += match word.as_str() {
        // Python's words.
        "True" => "true",
        "False" => "false",
        "None" => "null",
        word if serde_json::from_str::<Value>(word).is_ok() => word,
        _ => return Read::Broken,
    };
    Read::Done
}

/// Part of a text, as within quotes in JSON.
pub(super) fn escaped(part: &str) -> String {
    let json = Value::from(part).to_string();
    let inner = json
        .strip_prefix('"')
        .and_then(|json| json.strip_suffix('"'));
    inner.unwrap_or_default().to_owned()
}

/// Length of the name at the beginning of a text, which the mark follows. `None` if more is needed.
/// A known name may have the mark in it.
pub(super) fn name<'a>(
    held: &str,
    known: impl Iterator<Item = &'a str>,
    mark: &str,
) -> Option<usize> {
    let mut longest = None;
    for name in known {
        let head = format!("{name}{mark}");
        if held.starts_with(&head) {
            longest = longest.max(Some(name.len()));
        } else if head.starts_with(held) {
            return None;
        }
    }
    longest.or_else(|| held.find(mark))
}
