//! Arguments of a call in a family's own form. Pure.
//!
//! ```text
//! <parameter=town>        {town:<|"|>Oslo<|"|>,days:2}        f(town='Oslo', days=2)
//! Oslo
//! </parameter> ...
//! ```
//!
//! | concept | where |
//! |---|---|
//! | a form, as data | [`Arguments`] |
//! | what the schema of an argument says about its form | `schema.rs` |
//! | grammar of the arguments of a tool | [`ArgumentGrammar`] |
//! | the arguments while they are written, as JSON | [`ArgumentReader`] |
//! | JSON arguments in the form | [`Arguments::written`] |

mod gemma;
mod grammar;
mod json;
mod listed;
mod schema;
mod written;

use super::tool::Tool;
use gemma::GemmaReader;
pub(super) use grammar::ArgumentGrammar;
use json::JsonScan;
use listed::ListedReader;
use schema::Members;

/// Form of a call's arguments.
#[derive(Debug)]
pub(super) enum Arguments {
    /// A JSON object.
    Json,
    /// Names and values between marks.
    Listed(Listed),
    /// An object in the notation of Gemma 4: names without quotes, texts between [`QUOTE`]s, no
    /// escapes.
    Gemma,
}

/// Arguments between marks. White space before a name or the end is skipped.
///
/// ```text
/// name NAME value ... behind  between  name NAME value ... behind  end
/// ```
#[derive(Debug)]
pub(super) struct Listed {
    /// Text before a name.
    pub(super) name: &'static str,
    /// Texts between a name and its value. Between two may be white space.
    pub(super) value: &'static [&'static str],
    /// Text behind a value.
    pub(super) behind: &'static str,
    /// Text between two arguments.
    pub(super) between: &'static str,
    /// Text behind the last argument.
    pub(super) end: &'static str,
    /// True if a text has neither quotes nor escapes. Otherwise a value is JSON, and a text may
    /// also stand in single quotes, as in Python.
    pub(super) raw: bool,
}

/// Begins and ends a text of Gemma 4.
const QUOTE: &str = "<|\"|>";

/// Progress of a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Read {
    /// Some text was processed.
    On,
    /// More text is needed.
    More,
    /// The arguments are complete.
    Done,
    /// The text is none of the form. Only in a turn without its grammar.
    Broken,
}

/// Arguments of a call while they are written, as the text of a JSON object.
#[derive(Clone)]
pub(super) enum ArgumentReader {
    Json(JsonScan),
    Listed(ListedReader),
    Gemma(GemmaReader),
}

impl Arguments {
    /// Reader of the arguments of a call of this tool.
    pub(super) fn reader(&'static self, tool: &Tool) -> ArgumentReader {
        let schema = tool.schema();
        match self {
            Self::Json => ArgumentReader::Json(JsonScan::default()),
            Self::Listed(form) => {
                let members = Members::of(&schema, &schema);
                let count = members.named.len();
                let members = members.limited(count);
                ArgumentReader::Listed(ListedReader::new(form, &members, &schema))
            }
            Self::Gemma => ArgumentReader::Gemma(GemmaReader::new(&schema)),
        }
    }
}

impl ArgumentReader {
    /// Moves what is certain from the text so far to the JSON.
    pub(super) fn read(&mut self, held: &mut String, json: &mut String) -> Read {
        loop {
            let read = match self {
                Self::Json(scan) => scan.read(held, json),
                Self::Listed(reader) => reader.read(held, json),
                Self::Gemma(reader) => reader.read(held, json),
            };
            if read != Read::On {
                return read;
            }
        }
    }
}
