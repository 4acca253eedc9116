//! Reader of arguments in any form.

use super::form::{Arguments, Read};
use super::gemma::GemmaReader;
use super::json::JsonScan;
use super::listed::ListedReader;
use super::schema::Members;
use crate::tools::tool::Tool;

/// Arguments of a call while they are written, as the text of a JSON object.
#[derive(Clone)]
pub(in crate::tools) enum ArgumentReader {
    Json(JsonScan),
    Listed(ListedReader),
    Gemma(GemmaReader),
}

impl Arguments {
    /// Reader of the arguments of a call of this tool.
    pub(in crate::tools) fn reader(&'static self, tool: &Tool) -> ArgumentReader {
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
    pub(in crate::tools) fn read(&mut self, held: &mut String, json: &mut String) -> Read {
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
