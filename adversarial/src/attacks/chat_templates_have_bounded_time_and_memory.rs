//! A model file can come from anywhere, and its chat template is a program. These templates want
//! unlimited time or memory: each step doubles a text, scans one, compares lists or multiplies
//! constants. Each rendering must end with an error or a short prompt.

use std::time::Duration;

use hearthnet_tokens::{ChatMessage, ChatTemplate};
use tokio::time::timeout;

use super::prelude::*;
use crate::memory;

/// Longer than the slowest permitted template, which takes seconds on an idle machine.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Memory of a rendering: three times the bytes that it may handle (a growing text is copied into a
/// buffer of twice its size), for this test and two others that may run at the same time.
const BUDGET: u64 = 3 * 3 * (128 << 20);

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    let own = std::process::id();
    for (name, source) in hearthnet_testkit::hostile_templates() {
        memory::forget_peak(own);
        let before = memory::usage(own);
        let rendering = tokio::task::spawn_blocking(move || {
            let template = ChatTemplate::new(&source, "", "")?;
            template.render(&[ChatMessage::user("hello")], true)
        });
        let what = format!("a template, {name}");
        match timeout(TIMEOUT, rendering).await {
            Err(_) => found.check(&*what, "an end", "no end within a minute", false),
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
