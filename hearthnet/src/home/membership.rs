//! Copy of basic facts about the community beside its log: its id, and the addresses of its
//! members. With it a lost or damaged log is restored from another member.
//!
//! The log is authoritative. The file is a few KiB of JSON in the data directory, written
//! atomically, and only when its content has changed.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use hearthnet_bus::log::{Community, Level};
use hearthnet_bus::{CommunityId, NodeId, now_ms};
use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{self, Access};
use serde::{Deserialize, Serialize};

pub(crate) const FILE: &str = "community.json";
/// Largest file that is read: far more than [`MAX_KNOWN`] members need.
const MAX_BYTES: u64 = 1 << 20;
/// Members whose addresses are kept. One that answers is enough.
const MAX_KNOWN: usize = 64;
/// Addresses kept of each member.
const MAX_ENDPOINTS: usize = 4;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Membership {
    pub(crate) community: CommunityId,
    /// Name of the community.
    pub(crate) name: String,
    /// Level of this node when the file was written.
    pub(crate) level: Option<Level>,
    /// Last known addresses of other members, `ADDR:PORT` by node id.
    pub(crate) members: BTreeMap<String, Vec<String>>,
    /// Name of the member that refused this node's key as revoked, until the next link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) put_out_by: Option<String>,
    /// Time of this node's revocation in the log; Unix ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) revoked_ms: Option<u64>,
    /// Whether the log freezes this node's key: two histories were signed with it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) frozen: bool,
}

impl Membership {
    /// Reads the file of a data directory; `None` if it is missing or unreadable.
    pub(crate) fn read(dir: &Path) -> Option<Self> {
        let text = regular_file::read(&path(dir), MAX_BYTES);
        match text.and_then(|text| Ok(serde_json::from_slice(&text)?)) {
            Ok(noted) => Some(noted),
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!("{} cannot be read: {error}", path(dir).display());
                }
                None
            }
        }
    }

    /// Updates the file from the log, if anything changed. An error of the disk is not reported:
    /// the file is only needed after a loss.
    pub(crate) fn note(dir: &Path, state: &Community, own: &NodeId) {
        let new = Self::now(dir, state, own);
        if Self::read(dir).as_ref() != Some(&new) {
            new.write(dir);
        }
    }

    /// Content for the current state of the log, keeping facts that are not in the log.
    pub(crate) fn now(dir: &Path, state: &Community, own: &NodeId) -> Self {
        let old = Self::read(dir).filter(|old| old.community == state.id);
        Self::of(state, own, old.as_ref())
    }

    /// Records the member that refused this node's key, or clears it. Returns whether that is new.
    pub(crate) fn note_refusal(dir: &Path, by: Option<String>) -> bool {
        match Self::read(dir) {
            Some(mut noted) if noted.put_out_by != by => {
                noted.put_out_by = by;
                noted.write(dir);
                true
            }
            _ => false,
        }
    }

    fn of(state: &Community, own: &NodeId, old: Option<&Self>) -> Self {
        let now = now_ms();
        let mut members = BTreeMap::new();
        for (node, _) in state.members().filter(|(node, _)| *node != own) {
            if members.len() >= MAX_KNOWN {
                break;
            }
            let id = node.to_string();
            let heard = state.endpoints_of(node, now).to_vec();
            let endpoints = match heard.is_empty() {
                false => heard,
                true => old
                    .and_then(|old| old.members.get(&id).cloned())
                    .unwrap_or_default(),
            };
            if !endpoints.is_empty() {
                members.insert(id, endpoints.into_iter().take(MAX_ENDPOINTS).collect());
            }
        }
        Self {
            community: state.id,
            name: state.name.clone(),
            level: state.level(own),
            members,
            put_out_by: old.and_then(|old| old.put_out_by.clone()),
            revoked_ms: state
                .revoked()
                .find(|(node, _)| *node == own)
                .map(|(_, revocation)| revocation.time_ms),
            frozen: state.is_frozen(own),
        }
    }

    /// Addresses of members in the format of `discovery.static_peers`.
    pub(crate) fn peers(&self) -> Vec<String> {
        let of = |(node, endpoints): (&String, &Vec<String>)| {
            let peer = |endpoint: &String| format!("{endpoint}#{node}");
            endpoints.iter().map(peer).collect::<Vec<_>>()
        };
        self.members.iter().flat_map(of).collect()
    }

    fn write(&self, dir: &Path) {
        let written = serde_json::to_vec_pretty(self)
            .map_err(std::io::Error::from)
            .and_then(|bytes| whole_file::replace(&path(dir), &bytes, Access::Owner));
        if let Err(error) = written {
            tracing::debug!("{} was not written: {error}", path(dir).display());
        }
    }
}

fn path(dir: &Path) -> PathBuf {
    dir.join(FILE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearthnet_bus::log::Body;
    use hearthnet_bus::testing::{self, id, key};

    #[test]
    fn a_membership_file_round_trips_and_garbage_is_ignored() {
        let home = testing::Home::founded(key(1), true);
        let (dir, log) = (home.path(), &home.log);
        assert_eq!(Membership::read(dir), None);
        Membership::note(dir, &log.state(), &id(1));
        let noted = Membership::read(dir).unwrap();
        assert_eq!(noted.community, log.community());
        assert_eq!(
            (noted.name.as_str(), noted.level),
            ("Elm Street", Some(Level::Anchor))
        );
        assert!(noted.peers().is_empty());
        Membership::note_refusal(dir, Some("attic".into()));
        // An update from the log keeps an anchor's refusal.
        Membership::note(dir, &log.state(), &id(1));
        let noted = Membership::read(dir).unwrap();
        assert_eq!(noted.put_out_by.as_deref(), Some("attic"));
        std::fs::write(path(dir), b"{").unwrap();
        assert_eq!(Membership::read(dir), None);
    }

    #[test]
    fn the_last_address_of_a_silent_member_is_kept() {
        let home = testing::Home::founded(key(1), true);
        home.append(Body::NodeSeen {
            endpoints: vec!["192.0.2.1:7600".to_owned()],
            name: "a".into(),
            software: "s".into(),
        });
        // State as another member sees it.
        let other = id(2);
        let first = Membership::of(&home.log.state(), &other, None);
        assert_eq!(first.peers(), [format!("192.0.2.1:7600#{}", id(1))]);
        let dir = tempfile::tempdir().unwrap();
        let quiet = testing::durable_copy(dir.path(), &home.log);
        let later = Membership::of(&quiet.state(), &other, Some(&first));
        assert_eq!(later.members, first.members);
    }
}
