//! Reader of Gemma 4's objects.

use serde_json::Value;

use super::form::{QUOTE, Read};
use super::json::{escaped, name, word};
use crate::tools::held::{skip_space, sure};

#[derive(Clone, Copy)]
enum State {
    /// Before a value; `true` if the list may end.
    Value(bool),
    /// Before a name; `true` if the object may end.
    Name(bool),
    /// Within a text.
    Text,
    /// Behind a value.
    Behind,
}

/// Object or list that has begun.
#[derive(Clone)]
struct Level {
    is_object: bool,
    /// Names of the object so far.
    names: Vec<String>,
    /// The member at hand has appeared before, and is left out.
    again: bool,
}

/// Reads the arguments as Gemma 4 writes them.
#[derive(Clone)]
pub(in crate::tools) struct GemmaReader {
    /// Names in the schema, wherever they are.
    names: Vec<String>,
    levels: Vec<Level>,
    state: State,
}

impl GemmaReader {
    pub(super) fn new(schema: &Value) -> Self {
        let mut names = Vec::new();
        collect_names(schema, &mut names);
        Self {
            names,
            levels: Vec::new(),
            state: State::Value(false),
        }
    }

    pub(super) fn read(&mut self, held: &mut String, json: &mut String) -> Read {
        let mut new = String::new();
        let left_out = self.is_left_out();
        let read = match self.state {
            State::Text => self.text(held, &mut new),
            _ => self.outside(held, &mut new),
        };
        if !left_out {
            json.push_str(&new);
        }
        read
    }

    fn is_left_out(&self) -> bool {
        self.levels.iter().any(|level| level.again)
    }

    fn go(&mut self, state: State) -> Read {
        self.state = state;
        Read::On
    }

    /// The next mark, name, number or word outside texts.
    fn outside(&mut self, held: &mut String, json: &mut String) -> Read {
        skip_space(held);
        let Some(c) = held.chars().next() else {
            return Read::More;
        };
        let ends = match self.state {
            State::Value(may_end) | State::Name(may_end) => may_end,
            State::Behind | State::Text => true,
        };
        let within = self.levels.last().map(|level| level.is_object);
        match (c, self.state) {
            ('}', _) if ends && within == Some(true) => self.end(held, json),
            (']', _) if ends && within == Some(false) => self.end(held, json),
            (',', State::Behind) => {
                held.remove(0);
                match within {
                    Some(true) => self.go(State::Name(false)),
                    _ => {
                        json.push_str(", ");
                        self.go(State::Value(false))
                    }
                }
            }
            (_, State::Name(_)) => self.name(held, json),
            (_, State::Value(_)) => self.value(c, held, json),
            _ => Read::Broken,
        }
    }

    fn end(&mut self, held: &mut String, json: &mut String) -> Read {
        json.extend(held.drain(..1));
        self.levels.pop();
        self.behind()
    }

    /// Behind a value, which was the last one if nothing is open.
    fn behind(&mut self) -> Read {
        let Some(level) = self.levels.last_mut() else {
            return Read::Done;
        };
        level.again = false;
        self.go(State::Behind)
    }

    fn name(&mut self, held: &mut String, json: &mut String) -> Read {
        let known = self.names.iter().map(String::as_str);
        let Some(end) = name(held, known, ":") else {
            return Read::More;
        };
        let name: String = held.drain(..end).collect();
        held.remove(0);
        let Some(level) = self.levels.last_mut() else {
            return Read::Broken;
        };
        level.again = level.names.contains(&name);
        if !level.again {
            if !level.names.is_empty() {
                json.push_str(", ");
            }
            json.push_str(&Value::from(name.as_str()).to_string());
            json.push_str(": ");
            level.names.push(name);
        }
        self.go(State::Value(false))
    }

    fn value(&mut self, c: char, held: &mut String, json: &mut String) -> Read {
        if matches!(c, '{' | '[') {
            json.extend(held.drain(..1));
            self.levels.push(Level {
                is_object: c == '{',
                names: Vec::new(),
                again: false,
            });
            return self.go(match c {
                '{' => State::Name(true),
                _ => State::Value(true),
            });
        }
        if held.starts_with(QUOTE) {
            held.drain(..QUOTE.len());
            json.push('"');
            return self.go(State::Text);
        }
        if QUOTE.starts_with(held.as_str()) {
            return Read::More;
        }
        match word(held, json) {
            Read::Done => self.behind(),
            read => read,
        }
    }

    fn text(&mut self, held: &mut String, json: &mut String) -> Read {
        if let Some(end) = held.find(QUOTE) {
            let part: String = held.drain(..end).collect();
            held.drain(..QUOTE.len());
            *json += &escaped(&part);
            json.push('"');
            return self.behind();
        }
        let end = sure(held, QUOTE);
        let part: String = held.drain(..end).collect();
        *json += &escaped(&part);
        Read::More
    }
}

/// Names of all properties within a schema.
fn collect_names(schema: &Value, names: &mut Vec<String>) {
    match schema {
        Value::Array(items) => items.iter().for_each(|item| collect_names(item, names)),
        Value::Object(members) => {
            if let Some(Value::Object(properties)) = members.get("properties") {
                names.extend(properties.keys().cloned());
            }
            members
                .values()
                .for_each(|value| collect_names(value, names));
        }
        _ => {}
    }
}
