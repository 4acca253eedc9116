//! Chat templates in `tokenizer_config.json` or a file of their own.

use std::path::Path;

use serde_json::Value as Json;

use super::tokens::{MAX_SMALL_BYTES, wrong};
use crate::gguf::Value;
use crate::gguf::writer::Writer;
use crate::hugging_face::directory::{read, read_json};
use crate::hugging_face::error::ImportError;

/// Writes the default chat template, and others by name.
pub(super) fn write(
    directory: &Path,
    settings: &Json,
    writer: &mut Writer,
) -> Result<(), ImportError> {
    let key = "tokenizer.chat_template";
    let template = match settings.get("chat_template") {
        Some(template) => Some(template.clone()),
        None => template_file(directory)?,
    };
    match template {
        Some(Json::String(template)) => Ok(writer.set(key, Value::String(&template))?),
        Some(Json::Array(list)) => {
            let text = |entry: &Json, key: &str| Some(entry.get(key)?.as_str()?.to_owned());
            let mut names = Vec::new();
            for entry in &list {
                let (Some(name), Some(template)) = (text(entry, "name"), text(entry, "template"))
                else {
                    continue;
                };
                let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
                let name: String = name.chars().map(plain).collect();
                let full = match name.as_str() {
                    "default" => key.to_owned(),
                    name => format!("{key}.{name}"),
                };
                writer.set(&full, Value::String(&template))?;
                names.extend(Some(name).filter(|name| name != "default"));
            }
            match names.is_empty() {
                true => Ok(()),
                false => Ok(writer
                    .set_strings("tokenizer.chat_templates", names.iter().map(String::as_str))?),
            }
        }
        _ => Ok(()),
    }
}

fn template_file(directory: &Path) -> Result<Option<Json>, ImportError> {
    let name = "chat_template.jinja";
    if let Some(text) = read(directory, name, MAX_SMALL_BYTES)? {
        let text = String::from_utf8(text).map_err(|_| wrong(name, "this is not UTF-8"))?;
        return Ok(Some(Json::String(text)));
    }
    let file = read_json(directory, "chat_template.json", MAX_SMALL_BYTES)?;
    Ok(file.and_then(|mut file| file.remove("chat_template")))
}
