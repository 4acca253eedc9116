//! A model file comes from anywhere, and its chat template is a program. These want all the time or
//! memory of whoever opens the file and asks something: each step of theirs doubles a text, looks
//! through one, compares lists, or asks for a product of constants. Each must come to an end, with an
//! error or a short prompt.

use std::time::Duration;

use hearthnet_model::{ChatMessage, ChatTemplate};
use tokio::time::timeout;

use crate::memory;
use crate::{Bench, Findings, HarnessError};

/// A template that is still at work after this has no end: the slowest that is let takes seconds,
/// on a machine that does nothing else.
const PATIENCE: Duration = Duration::from_secs(60);
/// What a rendering may take: three times the bytes that it may handle (a text that grows is copied
/// into twice its size), for each of two tests that may run beside this one.
const BUDGET: u64 = 3 * 3 * (128 << 20);

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let own = std::process::id();
    for (name, source) in hearthnet_testkit::hostile_templates() {
        memory::forget_peak(own);
        let before = memory::usage(own);
        let rendering = tokio::task::spawn_blocking(move || {
            let template = ChatTemplate::new(&source, "", "")?;
            template.render(&[ChatMessage::user("hello")], true)
        });
        let what = format!("a template, {name}");
        match timeout(PATIENCE, rendering).await {
            Err(_) => found.check(&*what, "an end", "none in a minute", false),
            Ok(rendered) => {
                let rendered = rendered?;
                let text = rendered.map_or(0, |text| text.len());
                found.check(&*what, "an error or a short text", text, text < 1 << 16);
            }
        }
        if let Some((before, after)) = before.zip(memory::usage(own)) {
            let grown = after.peak.saturating_sub(before.resident);
            let seen = format!("{} MiB", grown >> 20);
            let expected = format!("at most {} MiB", BUDGET >> 20);
            found.check(format!("{what}: memory"), expected, seen, grown <= BUDGET);
        }
    }
    Ok(())
}
