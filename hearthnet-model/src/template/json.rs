//! `tojson` as transformers defines it: Python's `json.dumps` without escaping for HTML.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use std::fmt::Write as _;

use crate::tokenizer::MAX_TEXT_BYTES;

/// Nesting that is written. No template builds values as deep as this.
const MAX_DEPTH: usize = 64;

/// The filter: `value | tojson` or `value | tojson(indent=4)`.
pub(super) fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent = options
        .get::<Option<usize>>("indent")?
        .map(|indent| indent.min(16));
    let ensure_ascii = options
        .get::<Option<bool>>("ensure_ascii")?
        .unwrap_or(false);
    options.assert_all_used()?;
    let mut writer = Writer {
        text: String::new(),
        indent,
        ensure_ascii,
    };
    writer.value(value, 0)?;
    Ok(Value::from(writer.text))
}

struct Writer {
    text: String,
    indent: Option<usize>,
    ensure_ascii: bool,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: the value is too deep",
            ));
        }
        // Indented, a value is much longer than what it is charged as.
        if self.text.len() > MAX_TEXT_BYTES {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: the text is too long",
            ));
        }
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            // Shown as Python does, with a capital.
            ValueKind::Bool => self
                .text
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => {
                let _ = write!(self.text, "{value}");
            }
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                self.text.push('[');
                let mut first = true;
                for item in value.try_iter()? {
                    self.separate(&mut first, depth + 1);
                    self.value(&item, depth + 1)?;
                }
                self.close(first, depth, ']');
            }
            ValueKind::Map => {
                self.text.push('{');
                let mut first = true;
                for key in value.try_iter()? {
                    self.separate(&mut first, depth + 1);
                    self.string(&key.to_string());
                    self.text.push_str(": ");
                    self.value(&value.get_item(&key)?, depth + 1)?;
                }
                self.close(first, depth, '}');
            }
            kind => {
                let message = format!("tojson: a value of kind {kind} has no JSON form");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn separate(&mut self, first: &mut bool, depth: usize) {
        match (std::mem::take(first), self.indent) {
            (true, None) => {}
            (false, None) => self.text.push_str(", "),
            (true, Some(_)) => self.new_line(depth),
            (false, Some(_)) => {
                self.text.push(',');
                self.new_line(depth);
            }
        }
    }

    fn close(&mut self, empty: bool, depth: usize, bracket: char) {
        if !empty && self.indent.is_some() {
            self.new_line(depth);
        }
        self.text.push(bracket);
    }

    fn new_line(&mut self, depth: usize) {
        self.text.push('\n');
        self.text
            .extend(std::iter::repeat_n(' ', depth * self.indent.unwrap_or(0)));
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for c in text.chars() {
            match c {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.text, "\\u{unit:04x}");
                    }
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
    }
}
