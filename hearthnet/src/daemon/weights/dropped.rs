//! Parts of models that the community dropped: removed at once, or at the next start.

use std::path::Path;
use std::sync::Arc;

use hearthnet_bus::log::Adoption;
use hearthnet_files::WeightsId;
use hearthnet_files::part::{Part, folder};

use crate::cli::note;
use crate::home::Home;
use crate::models::adopted::{name_in_parts, part_folder, parts_dir};
use crate::node::{DaemonNode, wait_until_synced};

/// Ends this home's use of the part of a dropped model. `open` is the part, if it is open here.
pub(super) fn end_use(home: &Home, model: &Adoption, open: Option<Arc<Part>>) {
    let own = name_in_parts(home);
    let ended = match (open, part_folder(model), parts_dir()) {
        (Some(part), _, _) => part.leave(&own),
        (None, Some(_), Ok(parts)) => folder::leave(&parts, &WeightsId(model.weights), &own),
        _ => return,
    };
    if let Err(why) = ended {
        let name = &model.name;
        note(format!(
            "the part of {name} stays until the next start: {why}"
        ));
    }
}

/// Removes the parts of models that were dropped while this home did not run. Waits until the log
/// has what neighbours know, because a log that was restored may lack an adoption.
pub(in crate::daemon) async fn remove_dropped(home: Home, node: Arc<DaemonNode>) {
    wait_until_synced(&node.node).await;
    let removed = tokio::task::spawn_blocking(move || {
        let Ok(parts) = parts_dir() else {
            return Vec::new();
        };
        let (state, own) = (home.state(), name_in_parts(&home));
        remove_unused(&parts, &own, |weights| state.model(weights).is_some())
    });
    for weights in removed.await.unwrap_or_default() {
        note(format!(
            "removed the part of a model that was dropped meanwhile ({})",
            weights.to_string().get(..8).unwrap_or_default()
        ));
    }
}

/// Ends a home's use of the parts that are not adopted. Returns those that were removed: no other
/// home uses them, and no process has them open.
fn remove_unused(
    parts: &Path,
    own: &str,
    is_adopted: impl Fn(&[u8; 32]) -> bool,
) -> Vec<WeightsId> {
    let mut found = folder::parts_in(parts);
    found.retain(|weights| {
        let used = folder::uses(&Part::folder_in(parts, weights), own);
        used && !is_adopted(&weights.0)
            && folder::leave(parts, weights, own).unwrap_or_else(|why| {
                tracing::info!("the part of a dropped model stays: {why}");
                false
            })
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_parts_that_this_home_used_and_no_other_home_uses_are_removed() {
        let parts = tempfile::tempdir().unwrap();
        let path = |n: u8| Part::folder_in(parts.path(), &WeightsId([n; 32]));
        for n in 1..=4 {
            std::fs::create_dir(path(n)).unwrap();
        }
        for (n, home) in [
            (1, "own"),
            (2, "own"),
            (2, "other"),
            (3, "other"),
            (4, "own"),
        ] {
            folder::enter(&path(n), home).unwrap();
        }
        std::fs::create_dir(parts.path().join("own")).unwrap();
        let removed = remove_unused(parts.path(), "own", |weights| weights[0] == 4);
        assert_eq!(removed, [WeightsId([1; 32])]);
        assert!(!path(1).exists());
        assert!([2, 3, 4].iter().all(|n| path(*n).exists()));
        // The other home's use alone is left of the second.
        assert!(!folder::uses(&path(2), "own") && folder::uses(&path(2), "other"));
        assert!(parts.path().join("own").exists());
    }
}
