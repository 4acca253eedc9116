//! Text from others is shown to users: an error of a file's template, the name of a field that a
//! program sent. On a terminal, in a log or on a page it could move the cursor, change the window
//! title, forge a line or change the writing direction. One function sanitizes it: it comes out as
//! characters that take up space and do nothing else.

use hearthnet_text::is_plain;
use hearthnet_tokens::{ChatMessage, ChatTemplate};
use serde_json::{Value, json};

use super::prelude::*;
use crate::household::{MODEL, ask, interface, service};

/// Each ends in a word by which the test finds it again.
const WORDS: [(&str, &str); 4] = [
    ("an escape sequence", "\u{1b}]0;owned\u{7}evil"),
    ("reversed writing direction", "\u{202e}evil"),
    ("another line", "all is well\nerror: evil"),
    ("a zero-width character", "\u{200b}\u{feff}evil"),
];

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    let at = interface(service()?).await?;
    for (what, words) in WORDS {
        // Unescaped in a literal of the template language.
        let source = format!("{{{{ raise_exception('{words}') }}}}");
        let rendered = ChatTemplate::new(&source, "", "")
            .and_then(|template| template.render(&[ChatMessage::user("hello")], true));
        let said = rendered.err().map(|error| error.to_string());
        shown(found, &format!("{what} of a file's template"), said);

        let body = json!({ "model": MODEL, "prompt": "hello", words: 1 });
        let told = ask(at.local_addr(), "/v1/completions", &body.to_string()).await?;
        let told = told.and_then(|(_, body)| serde_json::from_str::<Value>(&body).ok());
        for part in ["message", "param"] {
            let said = told.as_ref().and_then(|told| told["error"][part].as_str());
            let what = format!("{what} in a request, as its answer's {part}");
            shown(found, &what, said.map(str::to_owned));
        }
    }
    Ok(())
}

fn shown(found: &mut Findings, what: &str, said: Option<String>) {
    let said = said.unwrap_or_default();
    let held = said.contains("evil") && said.chars().all(is_plain);
    found.check(
        what,
        "shown, without control characters",
        format!("{said:?}"),
        held,
    );
}
