//! Events while layers are served, for people and for programs.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::cli::{note, print_result};
use crate::hosting::host_config::{Ready, announcement};

/// Event while layers are served. In the local API the name of a variant is that of the event.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LayerEvent {
    Line { text: String },
    Ready(Box<Ready>),
}

/// Receives events; must not block.
pub(crate) type EventSink = Arc<dyn Fn(LayerEvent) + Send + Sync>;

/// Prints events as lines, or with `json` only the descriptor, as JSON.
pub(crate) fn print_event(json: bool, news: LayerEvent) {
    match news {
        LayerEvent::Line { text } if !json => note(text),
        LayerEvent::Line { .. } => {}
        // A closed output is no reason to stop.
        LayerEvent::Ready(ready) => drop(print_result(json, &ready, || announcement(&ready))),
    }
}
