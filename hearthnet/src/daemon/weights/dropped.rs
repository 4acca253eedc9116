//! Parts of models that the community dropped: removed at once, or at the next start.
//!
//! A model that is dropped and adopted again and again would have each home fetch it each time.
//! Therefore a home that has dropped it often opens it again only after a while.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::log::Adoption;
use hearthnet_files::part::{Part, folder};
use tokio::time::Instant;

use crate::cli::{Stop, first_digits, note};
use crate::home::Home;
use crate::models::adopted::{leave_parts, name_in_parts, part_folder, parts_dir};
use crate::node::DaemonNode;

/// Number of drops within [`COUNTED`] after which a model is no longer opened at once.
const FEW: usize = 2;
/// Time for which a drop counts.
const COUNTED: Duration = Duration::from_secs(3600);

/// Times at which this home ended the use of models that it had begun to fetch.
#[derive(Debug, Default)]
pub(super) struct Drops(BTreeMap<[u8; 32], Vec<Instant>>);

impl Drops {
    pub(super) fn add(&mut self, now: Instant, weights: [u8; 32]) {
        let counts = |at: &Instant| now.saturating_duration_since(*at) < COUNTED;
        self.0.retain(|_, drops| {
            drops.retain(counts);
            !drops.is_empty()
        });
        self.0.entry(weights).or_default().push(now);
    }

    /// Time from which on a model may be opened again; `None`: at once.
    pub(super) fn opens_at(&self, now: Instant, weights: &[u8; 32]) -> Option<Instant> {
        let drops = self.0.get(weights)?;
        let at = *drops.iter().rev().nth(FEW - 1)? + COUNTED;
        (at > now).then_some(at)
    }
}

/// Ends this home's use of the part of a dropped model. `open` is the part, if it is open here.
pub(super) async fn end_use(home: &Home, model: &Arc<Adoption>, open: Option<Arc<Part>>) {
    let (home, model) = (home.clone(), Arc::clone(model));
    let ended = tokio::task::spawn_blocking(move || remove_part(&home, &model, open));
    if let Err(error) = ended.await {
        tracing::warn!("the part of a dropped model stays: {error}");
    }
}

fn remove_part(home: &Home, model: &Adoption, open: Option<Arc<Part>>) {
    let own = name_in_parts(home);
    let ended = match (open, part_folder(model)) {
        (Some(part), _) => part.leave(&own),
        (None, Some(folder)) => folder::leave(&folder, &own),
        (None, None) => return,
    };
    if let Err(why) = ended {
        let name = &model.name;
        note(format!(
            "the part of {name} stays until the next start: {why}"
        ));
    }
}

/// Removes the parts of models that were dropped while this home did not run. Waits until the log
/// has what neighbours know, however long that takes, because a log that was restored may lack an
/// adoption.
pub(in crate::daemon) async fn remove_dropped(home: Home, node: Arc<DaemonNode>, stop: Stop) {
    let is_alone = home.state().members().count() < 2 && !home.log.is_in_doubt();
    if !is_alone {
        tokio::select! {
            () = node.node.until_in_sync() => {}
            () = stop.asked() => return,
        }
    }
    let removed = tokio::task::spawn_blocking(move || {
        let Ok(parts) = parts_dir() else {
            return Vec::new();
        };
        let (state, own) = (home.state(), name_in_parts(&home));
        leave_parts(
            &parts,
            &own,
            |weights| state.model(weights).is_some(),
            |why| tracing::info!("the part of a dropped model stays: {why}"),
        )
    });
    for part in removed.await.unwrap_or_default() {
        note(format!(
            "removed the part of a model that was dropped meanwhile ({})",
            first_digits(&part.weights.0)
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_is_dropped_again_and_again_is_opened_twice_an_hour() {
        let begin = Instant::now();
        let at = |minutes: u64| begin + Duration::from_secs(60 * minutes);
        let (one, other) = ([1; 32], [2; 32]);
        let mut drops = Drops::default();
        assert_eq!(drops.opens_at(at(0), &one), None);
        drops.add(at(0), one);
        assert_eq!(drops.opens_at(at(0), &one), None);
        drops.add(at(10), one);
        assert_eq!(drops.opens_at(at(10), &one), Some(at(60)));
        assert_eq!(drops.opens_at(at(59), &one), Some(at(60)));
        assert_eq!(drops.opens_at(at(60), &one), None);
        drops.add(at(61), one);
        assert_eq!(drops.opens_at(at(61), &one), Some(at(70)));
        assert_eq!(drops.opens_at(at(61), &other), None);
        drops.add(at(200), other);
        assert_eq!(drops.0.len(), 1);
    }
}
