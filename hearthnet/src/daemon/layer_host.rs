//! Ranges of layers of this process, their places and their memory.

use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::calls::Served;
use hearthnet_bus::log::Level;
use hearthnet_files::WeightsId;
use hearthnet_http::Health;
use hearthnet_orchestrator::placement::room;
use tokio::sync::watch;

use super::contributions::Computed;
use super::layer_events::{EventSink, LayerEvent};
use super::layer_request::{LayerRequest, Memory};
use super::ranges::{Range, Ranges, Taken};
use super::watch::Watch;
use crate::cli::{Failure, failure};
use crate::config::Config;
use crate::home::Home;
use crate::node::{DaemonNode, wait_until_synced};

/// Time without steps after which no answer runs.
pub(super) const ANSWERED: Duration = Duration::from_secs(3);

/// Hosts of layers in this process, at most one for each model.
pub(crate) struct LayerHost {
    pub(super) home: Home,
    pub(super) config: Config,
    pub(super) daemon_node: Arc<DaemonNode>,
    pub(super) served: Arc<Served>,
    pub(super) ranges: watch::Sender<Ranges>,
    /// Rows that were computed for other members.
    pub(super) computed: Arc<Computed>,
    /// Whether this machine gives anything to others now.
    pub(super) watch: Arc<Watch>,
    /// Health, as reported under /healthz, and the address of the metrics.
    pub(super) health: watch::Sender<Health>,
    pub(super) metrics: Option<String>,
}

impl LayerHost {
    /// Takes the place of a model, and its memory; `None` while its previous range is leaving.
    pub(super) fn place(&self, request: &LayerRequest) -> Result<Option<Place<'_>>, Failure> {
        let model = &request.model;
        let mut placed = Ok(false);
        self.ranges.send_if_modified(|ranges| {
            let memory = match ranges.is_free(model.weights, &model.id) {
                Ok(()) => request.memory(&self.config, ranges.budget(), ranges.held()),
                Err(Taken::Leaving) => return false,
                Err(Taken::Served(what)) => Err(failure!(
                    Host,
                    "the node on this machine serves layers already: {what}"
                )
                .code("layers_served")
                .hint("stop that first; `hearthnet status` shows it")),
            };
            placed = memory.map(|memory| {
                ranges.add(model.weights, Range::new(&model.id, memory));
                self.publish(ranges);
                true
            });
            matches!(placed, Ok(true))
        });
        Ok(placed?.then(|| Place {
            host: self,
            model: model.weights,
        }))
    }

    /// Gives a served range its part of the memory among `request.models` models: with fewer models
    /// than before at least what it had. A range that is larger than its part gives up layers later
    /// (`layers.rs`). Returns whether it is still served: not if its part holds no layer.
    pub(super) fn keep(&self, request: &LayerRequest, are_fewer: bool) -> bool {
        let model = request.model.weights;
        let Ok(layers) = request.engine.layer_bytes(&request.model.file) else {
            return false;
        };
        self.ranges.send_if_modified(|ranges| {
            let Some(before) = ranges.get(model).map(|range| range.memory) else {
                return false;
            };
            let used = ranges.budget().saturating_sub(before.weights);
            let Ok(mut memory) = request.memory(&self.config, used, ranges.held()) else {
                return false;
            };
            if are_fewer {
                memory.weights = memory.weights.max(before.weights);
            }
            ranges.resize(model, memory)
                || (room(memory.weights, &layers) > 0 && ranges.shrink(model, memory))
        })
    }

    /// Whether layers have to be given up before a further range gets its part of the memory.
    pub(super) fn is_shrinking(&self) -> bool {
        self.ranges.borrow().is_shrinking()
    }

    /// Resolves when no layers have to be given up.
    pub(super) async fn until_shrunk(&self) {
        let mut ranges = self.ranges.subscribe();
        let _ = ranges.wait_for(|ranges| !ranges.is_shrinking()).await;
    }

    /// Shows the state of the ranges in `node.status` and `/healthz`, and to the watch.
    fn publish(&self, ranges: &Ranges) {
        self.watch.set_held(ranges.held());
        self.daemon_node
            .set_serving(ranges.serving(), ranges.suspended());
        if let Some(health) = ranges.health() {
            self.health.send_replace(health);
        }
    }

    /// Whether steps of callers were computed within the last half second.
    pub(super) fn is_computing(&self) -> bool {
        self.ranges.borrow().is_computing()
    }

    /// Resolves when no layers are served.
    pub(crate) async fn idle(&self) {
        let mut ranges = self.ranges.subscribe();
        let _ = ranges.wait_for(Ranges::is_empty).await;
    }

    /// Checks in the current log that this node may serve layers.
    pub(super) fn right(&self) -> Result<(), Failure> {
        self.home.require_research(&self.config)?;
        self.home.require(Level::Trusted, "serve layers")
    }

    /// Checks the right to serve. If the log denies it, syncs first, since the log may be outdated.
    pub(crate) async fn settled_right(&self, tell: &EventSink) -> Result<(), Failure> {
        if self.right().is_ok() {
            return Ok(());
        }
        let text = "asking other members whether this node may serve layers".to_owned();
        tell(LayerEvent::Line { text });
        wait_until_synced(&self.daemon_node.node).await;
        self.right()
    }
}

/// Place of a model among the ranges; given back when dropped.
pub(super) struct Place<'a> {
    host: &'a LayerHost,
    model: WeightsId,
}

impl Place<'_> {
    /// Memory that the next range may take.
    pub(super) fn memory(&self) -> Memory {
        let ranges = self.host.ranges.borrow();
        let range = ranges.get(self.model);
        let memory = range.map(|range| range.next.unwrap_or(range.memory));
        memory.unwrap_or_default()
    }

    /// Whether the range is too large for the memory that the next one may take.
    pub(super) fn is_too_large(&self) -> bool {
        let ranges = self.host.ranges.borrow();
        ranges.get(self.model).is_some_and(|it| it.next.is_some())
    }

    /// Sets the number of layers that the range can hold.
    pub(super) fn set_room(&self, room: u32) {
        self.host.ranges.send_if_modified(|ranges| {
            let range = ranges.get_mut(self.model);
            range.is_some_and(|range| std::mem::replace(&mut range.room, room) != room)
        });
    }

    /// Changes the state of the range.
    pub(super) fn set(&self, change: impl FnOnce(&mut Range)) {
        self.host.ranges.send_modify(|ranges| {
            if let Some(range) = ranges.get_mut(self.model) {
                change(range);
            }
            self.host.publish(ranges);
        });
    }

    pub(super) fn set_serving(&self, serving: Result<Option<String>, String>) {
        self.set(|range| range.serving = serving);
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.host.ranges.send_modify(|ranges| {
            ranges.remove(self.model);
            self.host.publish(ranges);
        });
    }
}
