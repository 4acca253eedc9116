//! Reader of arguments between marks.

use serde_json::Value;

use super::form::{Listed, Read};
use super::json::{JsonScan, escaped, name};
use super::schema::{Kind, Members, Types};
use crate::tools::held::{Begins, begins, expect, head, is_space, sure};

#[derive(Clone)]
enum State {
    /// Before an argument, or the end. `true` before the first.
    Name(bool),
    /// Behind a name, before the text of this number.
    Value(usize),
    /// Within a value without quotes. `true` if its text has begun.
    Raw(Kind, bool),
    Json(JsonScan),
    /// Within single quotes.
    Quoted(bool),
    Behind,
}

/// Reads [`Listed`] arguments.
#[derive(Clone)]
pub(in crate::tools) struct ListedReader {
    form: &'static Listed,
    kinds: Vec<(String, Kind)>,
    /// Kind of an argument without a name in the schema.
    others: Kind,
    seen: Vec<String>,
    state: State,
    /// Kind of the argument at hand.
    kind: Kind,
    /// The argument has appeared before, and is left out.
    again: bool,
}

impl ListedReader {
    pub(super) fn new(form: &'static Listed, members: &Members, root: &Value) -> Self {
        let kinds = members.named.iter();
        let kinds = kinds.map(|(name, schema, _)| (name.clone(), Kind::of(schema, root)));
        let others = members.others.as_ref();
        Self {
            form,
            kinds: kinds.collect(),
            others: others.map_or(Kind::Any(Types::ALL), |schema| Kind::of(schema, root)),
            seen: Vec::new(),
            state: State::Name(true),
            kind: Kind::Json,
            again: false,
        }
    }

    pub(super) fn read(&mut self, held: &mut String, json: &mut String) -> Read {
        let mut new = String::new();
        let read = match &mut self.state {
            State::Name(first) => {
                let first = *first;
                return self.name(first, held, json);
            }
            State::Value(at) => {
                let at = *at;
                return self.value(at, held);
            }
            State::Behind => {
                let behind = self.form.behind;
                return self.expect(held, behind, State::Name(false));
            }
            State::Raw(kind, begun) => raw(*kind, begun, self.form.behind, held, &mut new),
            State::Json(scan) => scan.read(held, &mut new),
            State::Quoted(begun) => quoted(begun, held, &mut new),
        };
        if !self.again {
            json.push_str(&new);
        }
        match (read, &self.state) {
            (Read::Done, State::Raw(..)) => self.go(State::Name(false)),
            (Read::Done, _) => self.go(State::Behind),
            (read, _) => read,
        }
    }

    fn go(&mut self, state: State) -> Read {
        self.state = state;
        Read::On
    }

    /// Enters a state behind a text.
    fn expect(&mut self, held: &mut String, text: &str, then: State) -> Read {
        match expect(held, text) {
            Begins::With => self.go(then),
            Begins::May => Read::More,
            Begins::No => Read::Broken,
        }
    }

    fn name(&mut self, first: bool, held: &mut String, json: &mut String) -> Read {
        let form = self.form;
        match expect(held, form.end) {
            Begins::With => {
                json.push_str(if self.seen.is_empty() { "{}" } else { "}" });
                return Read::Done;
            }
            Begins::May => return Read::More,
            Begins::No => {}
        }
        let before = match first {
            true => form.name.to_owned(),
            false => format!("{}{}", form.between, form.name),
        };
        let text = held.trim_start_matches(is_space);
        let rest = match begins(text, &before) {
            Begins::With => text.get(before.len()..).unwrap_or_default(),
            Begins::May => return Read::More,
            Begins::No => return Read::Broken,
        };
        let Some(value) = form.value.first() else {
            return Read::Broken;
        };
        let known = self.kinds.iter().map(|(name, _)| name.as_str());
        let Some(end) = name(rest, known, value) else {
            return Read::More;
        };
        let name = rest.get(..end).unwrap_or_default().to_owned();
        let used = held.len() - rest.len() + end;
        held.drain(..used);
        let kind = self.kinds.iter().find(|(known, _)| *known == name);
        self.kind = kind.map_or(self.others, |(_, kind)| *kind);
        self.again = self.seen.contains(&name);
        if !self.again {
            json.push_str(if self.seen.is_empty() { "{" } else { ", " });
            json.push_str(&Value::from(name.as_str()).to_string());
            json.push_str(": ");
            self.seen.push(name);
        }
        self.go(State::Value(0))
    }

    fn value(&mut self, at: usize, held: &mut String) -> Read {
        if let Some(text) = self.form.value.get(at) {
            return self.expect(held, text, State::Value(at + 1));
        }
        if !self.form.raw {
            return match held.chars().next() {
                None => Read::More,
                Some('\'') => {
                    held.remove(0);
                    self.go(State::Quoted(false))
                }
                Some(_) => self.go(State::Json(JsonScan::default())),
            };
        }
        match self.kind {
            Kind::Json => self.go(State::Json(JsonScan::default())),
            kind => self.go(State::Raw(kind, false)),
        }
    }
}

/// Moves the next part of a value without quotes, and removes the text behind it. `begun`: the
/// text has begun.
fn raw(kind: Kind, begun: &mut bool, behind: &str, held: &mut String, json: &mut String) -> Read {
    let found = held.find(behind);
    let whole = found.and_then(|end| held.get(..end));
    // The reader knows a value that is no text at its end.
    if !*begun {
        let other = match (kind, whole) {
            (Kind::Text { nullable: true }, Some("null")) => Some("null"),
            (Kind::Text { nullable: true }, None) if "null".starts_with(head(held, behind)) => {
                return Read::More;
            }
            (Kind::Any(_), None) => return Read::More,
            (Kind::Any(types), Some(whole)) => {
                let value = serde_json::from_str::<Value>(whole);
                let other = value.is_ok_and(|value| !value.is_string() && types.allows(&value));
                Some(whole.trim()).filter(|_| other)
            }
            _ => None,
        };
        match other {
            Some(other) => *json += other,
            None => json.push('"'),
        }
        *begun = other.is_none();
    }
    let end = found.unwrap_or_else(|| sure(held, behind));
    let part: String = held.drain(..end).collect();
    if *begun {
        *json += &escaped(&part);
    }
    if found.is_none() {
        return Read::More;
    }
    held.drain(..behind.len());
    if *begun {
        json.push('"');
    }
    Read::Done
}

/// Moves the next part of a text in single quotes, behind the first one.
fn quoted(begun: &mut bool, held: &mut String, json: &mut String) -> Read {
    if !*begun {
        json.push('"');
        *begun = true;
    }
    let (mut text, mut used, mut ended) = (String::new(), 0, false);
    let mut chars = held.char_indices();
    while let Some((at, c)) = chars.next() {
        let c = match c {
            '\'' => {
                (used, ended) = (at + 1, true);
                break;
            }
            '\\' => match chars.next() {
                Some((_, 'n')) => '\n',
                Some((_, 'r')) => '\r',
                Some((_, 't')) => '\t',
                Some((_, escaped)) => escaped,
                None => break,
            },
            c => c,
        };
        text.push(c);
        used = chars.offset();
    }
    held.drain(..used);
    *json += &escaped(&text);
    if !ended {
        return Read::More;
    }
    json.push('"');
    Read::Done
}
