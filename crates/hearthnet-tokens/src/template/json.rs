//! `tojson` as transformers defines it: Python's `json.dumps` without HTML escaping.

use std::fmt::Write as _;
use std::io;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize as _;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use crate::tokenizer::MAX_TEXT_BYTES;

/// The filter: `value | tojson` or `value | tojson(indent=4)`. `budget.rs` has limited the depth of
/// the value.
pub(super) fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent = options.get::<Option<usize>>("indent")?;
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let mut text = Bounded(Vec::new());
    let written = match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut text, Spaced)),
        Some(indent) => {
            let margin = vec![b' '; indent.min(16)];
            let pretty = PrettyFormatter::with_indent(&margin);
            value.serialize(&mut Serializer::with_formatter(&mut text, pretty))
        }
    };
    let failed = |error: &dyn std::error::Error| {
        Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}"))
    };
    written.map_err(|error| failed(&error))?;
    let text = String::from_utf8(text.0).map_err(|error| failed(&error))?;
    match ensure_ascii {
        Some(true) => Ok(escaped(&text)),
        _ => Ok(text),
    }
}

/// Formatter for a single line with a space behind each comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: io::Write + ?Sized>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        out.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: io::Write + ?Sized>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        out.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: io::Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

/// Replaces non-ASCII characters, which occur only in strings, by hexadecimal UTF-16 escapes.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_ascii() {
            true => escaped.push(c),
            false => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(escaped, "\\u{unit:04x}");
                }
            }
        }
    }
    escaped
}

/// Text limited to the longest prompt: an indented value is much longer than its charge.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_TEXT_BYTES {
            return Err(io::Error::other("the text is too long"));
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
