use proptest::prelude::*;

use super::*;
use crate::testing::id;

const CHARSET: &str = "qpzry9x8gf2tvdw0s3jn54khce6mua7l";

type Change<T> = &'static dyn Fn(&mut T);

fn community(seed: u8) -> CommunityId {
    CommunityId::from(id(seed))
}

fn invite(hints: &[&str]) -> Invite {
    let hints = hints.iter().map(|h| h.parse().unwrap()).collect();
    Invite::new(community(1), [7; 32], 1_800_000_000, hints).unwrap()
}

fn encode(content: &[u8]) -> String {
    bech32::encode::<Bech32m>(PREFIX, content).unwrap()
}

#[test]
fn the_printed_form_of_a_known_invite_never_changes() {
    let known = invite(&["192.168.1.20:7600", "[fd00::20]:7600"]);
    assert_eq!(known.to_string(), KNOWN);
    assert_eq!(KNOWN.parse(), Ok(known));
    let spec = include_str!("../../../../specs/invite.md");
    assert!(spec.contains(&format!("\n{KNOWN}\n")));
    let characters = format!("| characters of a code | {MAX_CODE_CHARS} |");
    assert!(spec.contains(&characters));
}

/// Checked against the algorithm in BIP-350's text, run over these bytes in Python.
const KNOWN: &str = "hearth1qx9g3c7awsylr90a2tdj6096t4ev5ecfhuwegysm7d6gsqd5pah4cpc8qurswpc8qurswpc8qurs\
    wpc8qurswpc8qurswpc8qurswpc8qp45n5sqqnq2sqg5rkcqdlgqqqqqqqqqqqqqqqqqqqqqqgqakq5w90x5";

#[test]
fn a_code_survives_line_breaks_spaces_and_capitals() {
    let known = invite(&["10.0.0.1:1"]);
    let code = known.to_string();
    let lines: Vec<&str> = code
        .as_bytes()
        .chunks(30)
        .map(|line| std::str::from_utf8(line).unwrap())
        .collect();
    for text in [
        format!("  {code}\n"),
        lines.join("\r\n  "),
        code.to_ascii_uppercase(),
    ] {
        assert_eq!(text.parse::<Invite>().as_ref(), Ok(&known), "{text:?}");
    }
}

#[test]
fn each_kind_of_typo_has_its_own_error() {
    use InviteError::{Checksum, MixedCase, Prefix, TooLong};
    let code = invite(&[]).to_string();
    let cases = [
        (String::new(), Prefix),
        ("hello".into(), Prefix),
        ("hearth".into(), Prefix),
        (code.replacen("hearth1", "heart1", 1), Prefix),
        (code[1..].to_owned(), Prefix),
        (code.replacen("hearth1", "Hearth1", 1), MixedCase),
        (code[..code.len() - 1].to_owned(), Checksum),
        (format!("{code}q"), Checksum),
        ("hearth1".into(), Checksum),
        (format!("hearth1{}", "q".repeat(5000)), TooLong),
        (format!("hearth1{}", "q".repeat(400)), TooLong),
    ];
    let odd = ["!", "o", "é", "1", &code].map(|tail| {
        let found = tail.chars().find(|c| !CHARSET.contains(*c)).unwrap();
        (format!("{code}{tail}"), InviteError::Character { found })
    });
    for (text, error) in cases.into_iter().chain(odd) {
        assert_eq!(text.parse::<Invite>(), Err(error), "{text:?}");
    }
}

#[test]
fn a_right_checksum_over_wrong_content_is_refused_too() {
    let good = invite(&["10.0.0.1:1"]).bytes().to_vec();
    let with = |change: Change<Vec<u8>>| {
        let mut content = good.clone();
        change(&mut content);
        encode(&content).parse::<Invite>().unwrap_err()
    };
    assert_eq!(with(&|c| c[0] = 2), InviteError::Version { found: 2 });
    let changes: [Change<Vec<u8>>; 6] = [
        &|c| c.clear(),
        &|c| c.truncate(69),
        &|c| c.truncate(75),
        &|c| c[1..33].fill(0),
        &|c| c[70] = 5,
        &|c| (0..8).for_each(|_| c.extend([4, 10, 0, 0, 1, 0, 1])),
    ];
    for change in changes {
        assert!(matches!(with(change), InviteError::Malformed { .. }));
    }
    // Bech32 (not m) is another checksum.
    let other = bech32::encode::<bech32::Bech32>(PREFIX, &good).unwrap();
    assert_eq!(other.parse::<Invite>(), Err(InviteError::Checksum));
}

#[test]
fn the_longest_code_is_as_long_as_the_bound_says_and_one_more_hint_is_refused() {
    let hint: SocketAddr = "[2001:db8::1]:65535".parse().unwrap();
    let make = |n| Invite::new(community(1), [255; 32], (1 << 40) - 1, vec![hint; n]);
    let longest = make(MAX_HINTS).unwrap();
    let code = longest.to_string();
    assert!(code.len() <= MAX_CODE_CHARS && code.len() + 2 > MAX_CODE_CHARS);
    assert_eq!(code.parse(), Ok(longest));
    assert_eq!(make(9), Err(InviteError::Hints { found: 9 }));
    assert!(Invite::new(community(1), [0; 32], 1 << 40, vec![]).is_err());
}

#[test]
fn debug_and_refusals_show_nothing_of_the_secret() {
    let invite = invite(&[]);
    let secret = URL_SAFE_NO_PAD.encode([7; 32]);
    let shown = format!("{invite:?}");
    assert!(!shown.contains(&secret) && !shown.contains("7, 7") && !shown.contains("hearth1"));
}

#[test]
fn a_request_admits_only_its_node_to_its_community() {
    let node = id(2);
    let request = invite(&[]).request(node, "kitchen").unwrap();
    assert_eq!(request.verify(), Ok(()));
    let changes: [Change<JoinRequest>; 5] = [
        &|r| r.community = community(3),
        &|r| r.node = id(4),
        &|r| r.name.push('2'),
        &|r| r.invite = id(5),
        &|r| r.proof.0[0] ^= 1,
    ];
    for change in changes {
        let mut other = request.clone();
        change(&mut other);
        assert_eq!(other.verify(), Err(JoinError::Signature));
    }
}

#[test]
fn names_that_would_not_print_on_a_line_are_refused_by_both_sides() {
    let node = id(2);
    for name in ["", "a\nb", "\u{1b}[2J", &"a".repeat(65)] {
        assert_eq!(invite(&[]).request(node, name), Err(JoinError::Name));
        let mut request = invite(&[]).request(node, "x").unwrap();
        request.name = name.to_owned();
        assert_eq!(request.verify(), Err(JoinError::Name));
    }
}

#[test]
fn a_request_survives_json() {
    let node = id(2);
    let request = invite(&[]).request(node, "Küche").unwrap();
    let text = serde_json::to_string(&request).unwrap();
    assert_eq!(serde_json::from_str::<JoinRequest>(&text).unwrap(), request);
    for wrong in [
        text.replace("Küche\"", "Küche\",\"more\":1"),
        text.replace(&format!("{:?}", request.proof), "AAAA"),
    ] {
        assert!(serde_json::from_str::<JoinRequest>(&wrong).is_err());
    }
}

fn any_hint() -> impl Strategy<Value = SocketAddr> {
    let ip = prop_oneof![
        any::<[u8; 4]>().prop_map(IpAddr::from),
        any::<[u8; 16]>().prop_map(IpAddr::from),
    ];
    (ip, any::<u16>()).prop_map(|(ip, port)| SocketAddr::new(ip, port))
}

fn any_invite() -> impl Strategy<Value = Invite> {
    let hints = proptest::collection::vec(any_hint(), 0..=MAX_HINTS);
    (any::<u8>(), any::<[u8; 32]>(), 0u64..1 << 40, hints).prop_map(
        |(root, secret, expires, hints)| {
            Invite::new(community(root), secret, expires, hints).unwrap()
        },
    )
}

proptest! {
    #[test]
    fn every_invite_survives_its_code(invite in any_invite()) {
        let code = invite.to_string();
        prop_assert_eq!(code.parse::<Invite>(), Ok(invite));
    }

    #[test]
    fn up_to_three_wrong_characters_are_always_noticed(
        invite in any_invite(),
        slips in proptest::collection::vec((any::<prop::sample::Index>(), 0usize..31), 1..=3),
    ) {
        let code = invite.to_string();
        let mut bytes = code.clone().into_bytes();
        for (at, shift) in slips {
            let at = 7 + at.index(code.len() - 7);
            // A character that differs from the printed one, independent of earlier slips.
            let right = CHARSET.find(char::from(code.as_bytes()[at])).unwrap();
            bytes[at] = CHARSET.as_bytes()[(right + 1 + shift) % 32];
        }
        let typed = String::from_utf8(bytes).unwrap();
        prop_assert_eq!(typed.parse::<Invite>(), Err(InviteError::Checksum));
    }

    #[test]
    fn a_lost_doubled_or_swapped_character_is_noticed(
        invite in any_invite(), at in any::<prop::sample::Index>(), what in 0u8..3,
    ) {
        let code = invite.to_string();
        let at = 7 + at.index(code.len() - 8);
        let mut typed: Vec<char> = code.chars().collect();
        match what {
            0 => { typed.remove(at); }
            1 => typed.insert(at, typed[at]),
            _ => typed.swap(at, at + 1),
        }
        let typed: String = typed.into_iter().collect();
        prop_assert!(typed == code || typed.parse::<Invite>().is_err());
    }

    #[test]
    fn reading_never_panics(
        text in any::<String>(), tail in "[a-z0-9]{0,80}",
        content in proptest::collection::vec(any::<u8>(), 0..120),
    ) {
        let _ = text.parse::<Invite>();
        let _ = format!("hearth1{tail}").parse::<Invite>();
        let _ = encode(&content).parse::<Invite>();
    }

    #[test]
    fn what_is_accepted_is_what_would_be_printed(
        mut content in proptest::collection::vec(any::<u8>(), 70..90), hints in 0usize..3,
    ) {
        content[0] = 1;
        content[1..33].copy_from_slice(community(9).as_bytes());
        content.truncate(70);
        for _ in 0..hints {
            content.extend([4, 1, 2, 3, 4, 5, 6]);
        }
        let code = encode(&content);
        prop_assert_eq!(code.parse::<Invite>().unwrap().to_string(), code);
    }
}
