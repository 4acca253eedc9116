//! Which key of this home may sign a change of the community.

use hearthnet_bus::log::Level;

use crate::cli::{Failure, failure};
use crate::home::community::Home;

/// Whether the root key of this home must sign, because the node itself `may` not. The root key may
/// do everything that anchors may, also if the node's own key is no longer valid. `rule` states the
/// requirement, as in "only anchors may do this".
pub(crate) fn signs_as_root(home: &Home, may: bool, rule: &str) -> Result<bool, Failure> {
    if may || home.root_key()?.is_some() {
        return Ok(!may);
    }
    let own = home.level()?;
    Err(failure!(Community, "{rule}, and this node is {own}")
        .code("unauthorized")
        .hint("ask one of them; `hearthnet community members` shows each member's level"))
}

pub(crate) fn is_anchor(home: &Home) -> bool {
    home.state().level(&home.key.id()) == Some(Level::Anchor)
}

/// Whether the root key must sign a change of a node of level `level`: anchors change other
/// members, and only the root key changes anchors.
pub(crate) fn authority(home: &Home, level: Level, what: &str) -> Result<bool, Failure> {
    let may = level < Level::Anchor && is_anchor(home);
    let rule = match level {
        Level::Anchor => format!(
            "only the holder of the root key, the founder, may {what} an anchor, or make one"
        ),
        _ => format!("only anchors may {what} others"),
    };
    signs_as_root(home, may, &rule)
}
