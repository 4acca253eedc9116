//! Finds a member by id or name, and lists members.

use std::collections::BTreeMap;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::Community;
use serde_json::{Value, json};

use crate::cli::{Failure, failure, output};
use crate::home::community::now_ms;

/// Finds a member, or a former member: it may still hold its invite code.
pub(crate) fn find(text: &str, state: &Community) -> Result<NodeId, Failure> {
    let now = now_ms();
    let members = state.members();
    let members = members.map(|(node, _)| (*node, state.name_of(node, now)));
    let left = state.left().map(|node| (*node, "".into()));
    among(text, &members.chain(left).collect::<Vec<_>>())
}

/// All members as JSON. `own` is this node; `dated_back` counts the back-dated events of each
/// member.
pub(crate) fn json(
    state: &Community,
    own: &NodeId,
    dated_back: &BTreeMap<NodeId, u64>,
) -> Vec<Value> {
    let now = now_ms();
    let members = state.members().map(|(node, member)| {
        let heard = state.nodes(now).any(|seen| seen.node == *node);
        json!({
            "node": node.to_string(),
            "name": state.name_of(node, now),
            "level": member.level,
            "since_ms": member.since_ms,
            "frozen": state.is_frozen(node),
            "convicted": state.reputation(node).is_convicted(),
            "false_accuser": state.reputation(node).is_false_accuser(),
            "this_node": node == own,
            "online": heard,
            "heard": heard,
            "gave": member.gave,
            "dated_back": dated_back.get(node).unwrap_or(&0),
        })
    });
    members.collect()
}

/// The verdicts on disputes against a member.
pub(crate) fn judged(state: &Community, node: &NodeId) -> Option<&'static str> {
    let reputation = state.reputation(node);
    match (reputation.is_convicted(), reputation.is_false_accuser()) {
        (true, _) => Some("CONVICTED of wrong rows"),
        (_, true) => Some("accused falsely"),
        _ => None,
    }
}

/// All members as a table; `mark` returns the last cell of a member's row.
pub(crate) fn table(
    state: &Community,
    heading: &str,
    mark: impl Fn(&NodeId) -> &'static str,
) -> String {
    let rows = state.members().map(|(node, member)| {
        [
            state.shown_name(node, now_ms()),
            node.short(),
            member.level.to_string(),
            mark(node).to_owned(),
        ]
    });
    output::table(&format!("{heading}|node|level|"), rows)
}

/// Contributions of the members, as a table; empty if no member has announced anything.
pub(crate) fn given(state: &Community, heading: &str) -> String {
    let members = state.members();
    let given = members.filter_map(|(node, member)| Some((node, member.gave?)));
    let rows: Vec<_> = given
        .map(|(node, gave)| {
            [
                state.shown_name(node, now_ms()),
                gave.tokens.to_string(),
                hours(gave.minutes),
                output::bytes(gave.weights_bytes),
            ]
        })
        .collect();
    match rows.is_empty() {
        true => String::new(),
        false => output::table(&format!("{heading}|tokens|served|weights"), rows),
    }
}

/// Formats minutes as `41 min` or `3.5 h`.
pub(crate) fn hours(minutes: u64) -> String {
    match minutes {
        0..120 => format!("{minutes} min"),
        _ => format!("{}.{} h", minutes / 60, minutes % 60 / 6),
    }
}

/// Finds the node that `text` identifies: a node id, its short form as in tables, or a display name
/// in any case. Ambiguous names are refused, because every member chooses its own name.
fn among<N: AsRef<str>>(text: &str, members: &[(NodeId, N)]) -> Result<NodeId, Failure> {
    let text = text.trim();
    if let Ok(id) = text.parse::<NodeId>() {
        return match members.iter().any(|(member, _)| *member == id) {
            true => Ok(id),
            false => Err(unknown(text)),
        };
    }
    let folded = text.to_lowercase();
    let fits: Vec<&(NodeId, N)> = members
        .iter()
        .filter(|(id, name)| {
            id.short() == text || (!text.is_empty() && name.as_ref().to_lowercase() == folded)
        })
        .collect();
    match fits.as_slice() {
        [(id, _)] => Ok(*id),
        [] => Err(unknown(text)),
        several => {
            let of = |(id, name): &&(NodeId, N)| format!("{id} ({})", name.as_ref());
            let ids = several.iter().map(of).collect::<Vec<_>>().join(" and ");
            Err(failure!(Community, "{text:?} can be any of {ids}")
                .code("ambiguous_node")
                .hint("write the whole node id"))
        }
    }
}

fn unknown(text: &str) -> Failure {
    failure!(Community, "no member of this community is {text:?}")
    .code("unknown_node")
    .hint(
        "`hearthnet community members` lists the members; use a node id, its short form or a name",
    )
}

#[cfg(test)]
mod tests {
    use hearthnet_bus::testing::id;

    use super::*;

    fn find_in(text: &str) -> Result<NodeId, String> {
        let members = [(id(1), "attic"), (id(2), "kitchen"), (id(3), "kitchen")];
        among(text, &members).map_err(|f| f.to_string())
    }

    #[test]
    fn a_member_is_found_by_id_short_form_and_name() {
        assert_eq!(find_in(&id(2).to_string()), Ok(id(2)));
        assert_eq!(find_in(&id(2).short()), Ok(id(2)));
        assert_eq!(find_in(" attic "), Ok(id(1)));
    }

    #[test]
    fn a_name_of_two_is_refused_with_both_ids() {
        let error = find_in("kitchen").unwrap_err();
        assert!(error.contains(&id(2).to_string()) && error.contains(&id(3).to_string()));
    }

    #[test]
    fn a_name_is_the_same_in_capitals_and_two_that_differ_in_them_only_are_refused() {
        assert_eq!(find_in("ATTIC"), Ok(id(1)));
        let members = [(id(1), "Küche"), (id(2), "KÜCHE"), (id(3), "Bad")];
        assert_eq!(among("bAD", &members).map_err(drop), Ok(id(3)));
        let error = among("küche", &members).unwrap_err();
        assert!(error.has_code("ambiguous_node"), "{error}");
        let error = error.to_string();
        assert!(error.contains(&id(1).to_string()) && error.contains(&id(2).to_string()));
    }

    #[test]
    fn strangers_and_fragments_are_refused() {
        for text in [
            "",
            "attik",
            "ed25519:",
            &id(9).to_string(),
            &id(1).short()[..14],
        ] {
            assert!(
                find_in(text).unwrap_err().contains("no member of"),
                "{text:?}"
            );
        }
    }

    #[test]
    fn a_member_cannot_pass_for_another_by_taking_its_short_id_as_name() {
        let name = id(1).short();
        let members = [(id(1), "attic"), (id(2), name.as_str())];
        assert!(among(&name, &members).is_err());
    }
}
