//! What is known of the community beside its log: which one this home is in, and where its members
//! were. A log that is lost or beyond repair is filled again from any of them.
//!
//! The log is the truth, and this file a note of it: a few KiB of JSON in the data directory,
//! written whole or not at all, and only when something in it has changed.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use hearthnet_bus::log::{Community, Level};
use hearthnet_bus::{CommunityId, NodeId, now_ms, regular_file, whole_file};
use serde::{Deserialize, Serialize};

/// The file's name in the data directory.
pub(crate) const FILE: &str = "community.json";
/// Most bytes of the file that are looked at: far more than [`MAX_KNOWN`] members need.
const MAX_BYTES: u64 = 1 << 20;
/// Members whose addresses are kept: any one of them that answers is enough.
const MAX_KNOWN: usize = 64;
/// Addresses that are kept of each.
const MAX_ENDPOINTS: usize = 4;

/// The note.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Membership {
    /// Id of the community.
    pub(crate) community: CommunityId,
    /// What people call it.
    pub(crate) name: String,
    /// What this node was when it last looked.
    pub(crate) level: Option<Level>,
    /// Where other members listened when they were last heard of, `ADDR:PORT` by node id.
    pub(crate) members: BTreeMap<String, Vec<String>>,
    /// Who said that this node's key counts no more, if somebody did since it last had a link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) put_out_by: Option<String>,
    /// When this node was put out, as the log says; Unix ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) revoked_ms: Option<u64>,
    /// Whether the log says that two histories were signed with this node's key.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) frozen: bool,
}

impl Membership {
    /// What was noted in a data directory; `None` if nothing was, or nothing that can be read.
    pub(crate) fn read(dir: &Path) -> Option<Self> {
        let text = match regular_file::read(&path(dir), MAX_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!("{} cannot be read: {error}", path(dir).display());
                return None;
            }
        };
        match serde_json::from_slice(&text) {
            Ok(noted) => Some(noted),
            Err(error) => {
                tracing::warn!("{} cannot be read: {error}", path(dir).display());
                None
            }
        }
    }

    /// Notes what the log says now, if it says anything new. A disk that cannot be written is
    /// no reason to fail: the note is for another day.
    pub(crate) fn note(dir: &Path, state: &Community, own: &NodeId) {
        let new = Self::now(dir, state, own);
        if Self::read(dir).as_ref() != Some(&new) {
            new.write(dir);
        }
    }

    /// What the log says now, and what else was noted beside it.
    pub(crate) fn now(dir: &Path, state: &Community, own: &NodeId) -> Self {
        let old = Self::read(dir).filter(|old| old.community == state.id);
        Self::of(state, own, old.as_ref())
    }

    /// Notes who said that this node's key counts no more, or that nobody says so any more.
    /// Whether that is new.
    pub(crate) fn note_put_out(dir: &Path, by: Option<String>) -> bool {
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

    /// Where members may be, as `discovery.static_peers` has it.
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
            .and_then(|bytes| whole_file::replace(&path(dir), &bytes, 0o600));
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
    use hearthnet_bus::NodeKey;
    use hearthnet_bus::log::{Body, EventLog, Policy};

    #[test]
    fn what_was_noted_comes_back_and_rubbish_is_no_note() {
        let dir = tempfile::tempdir().unwrap();
        let (root, own) = (NodeKey::generate().unwrap(), NodeKey::generate().unwrap());
        assert_eq!(Membership::read(dir.path()), None);
        let policy = Policy::default();
        let log = EventLog::create(dir.path(), &root, own.id(), "Elm", policy, now_ms()).unwrap();
        Membership::note(dir.path(), &log.state(), &own.id());
        let noted = Membership::read(dir.path()).unwrap();
        assert_eq!(noted.community, log.community());
        assert_eq!(
            (noted.name.as_str(), noted.level),
            ("Elm", Some(Level::Anchor))
        );
        assert!(noted.peers().is_empty());
        Membership::note_put_out(dir.path(), Some("attic".into()));
        // A look at the log does not forget what an anchor said.
        Membership::note(dir.path(), &log.state(), &own.id());
        let noted = Membership::read(dir.path()).unwrap();
        assert_eq!(noted.put_out_by.as_deref(), Some("attic"));
        std::fs::write(path(dir.path()), b"{").unwrap();
        assert_eq!(Membership::read(dir.path()), None);
    }

    #[test]
    fn where_a_member_was_is_remembered_when_it_is_silent() {
        let dir = tempfile::tempdir().unwrap();
        let (root, own) = (NodeKey::generate().unwrap(), NodeKey::generate().unwrap());
        let policy = Policy::default();
        let log = EventLog::create(dir.path(), &root, own.id(), "Elm", policy, now_ms()).unwrap();
        let endpoints = vec!["192.0.2.1:7600".to_owned()];
        let seen = Body::NodeSeen {
            endpoints,
            name: "a".into(),
            software: "s".into(),
        };
        log.append(&own, seen, now_ms()).unwrap();
        // Seen from another member.
        let other = NodeKey::generate().unwrap().id();
        let first = Membership::of(&log.state(), &other, None);
        assert_eq!(first.peers(), [format!("192.0.2.1:7600#{}", own.id())]);
        let quiet = EventLog::prepare(&dir.path().join("b"), log.community()).unwrap();
        let durable = log.missing(&quiet.heads(), 1, 1 << 16).unwrap().events;
        quiet.receive(&durable, other, now_ms()).unwrap();
        let later = Membership::of(&quiet.state(), &other, Some(&first));
        assert_eq!(later.members, first.members);
    }
}
