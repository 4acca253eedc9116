//! Steps that are not answered yet.

use std::collections::BTreeMap;

/// Unanswered steps, per stream and epoch.
#[derive(Default)]
pub(crate) struct Steps {
    pub(super) by_stream: BTreeMap<(u32, u32), u32>,
    pub(crate) total: u32,
}

impl Steps {
    pub(crate) fn begin(&mut self, stream_key: (u32, u32)) {
        *self.by_stream.entry(stream_key).or_default() += 1;
        self.total += 1;
    }

    /// Records an answer. Returns `false` if no such step is unanswered.
    pub(crate) fn finish(&mut self, stream_key: (u32, u32)) -> bool {
        let Some(count) = self.by_stream.get_mut(&stream_key) else {
            return false;
        };
        *count -= 1;
        self.total -= 1;
        if *count == 0 {
            self.by_stream.remove(&stream_key);
        }
        true
    }

    /// Removes the steps of an ended stream; returns how many were unanswered.
    pub(crate) fn forget(&mut self, stream_key: (u32, u32)) -> u32 {
        let unanswered = self.by_stream.remove(&stream_key).unwrap_or(0);
        self.total -= unanswered;
        unanswered
    }
}
