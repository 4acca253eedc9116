//! Disputes, verdicts and the reputation that follows.

use std::collections::BTreeMap;

use serde_bytes::ByteArray;

use super::attacks::two_anchors;
use super::*;
use crate::MAX_SEALED_BYTES;

/// Dispute with the evidence `n`.
pub(super) fn dispute(n: u8, accused: u8, witness: Option<u8>) -> Dispute {
    Dispute {
        layers: (2, 5),
        accused: id(accused),
        weights: [6; 32],
        witness: witness.map(id),
        evidence: [n; 32],
        receipts: vec![[7; 32]; 1 + usize::from(witness.is_some())],
        evidence_bytes: 3000,
    }
}

pub(super) fn disputed(n: u8, accused: u8, witness: Option<u8>) -> Body {
    Body::Disputed(dispute(n, accused, witness))
}

/// Verdict on the dispute with the evidence `n` by this accuser.
pub(super) fn judged(n: u8, accuser: u8, finding: Finding) -> Body {
    Body::Judged {
        dispute: dispute(n, 0, None).id(&id(accuser)),
        finding,
    }
}

impl Home {
    /// Founder and anchor 1, anchors 2 and 3, trusted hosts 4, 5 and 6, members 7 and 8.
    fn with_judges() -> Self {
        let home = Self::new();
        for (seed, level) in (4..9).zip([Level::Trusted; 3].into_iter().chain([Level::Member; 2])) {
            home.admit(seed, level);
        }
        for seed in [2, 3] {
            home.append(ROOT, invited(100 + seed, Level::Anchor, 1));
            home.append(1, admitted(100 + seed, seed, Level::Anchor));
        }
        home
    }

    fn reputation(&self, seed: u8) -> (usize, usize) {
        let Reputation {
            guilty,
            falsely_accused,
        } = self.log.state().reputation(&id(seed));
        (guilty, falsely_accused)
    }

    #[track_caller]
    fn assert_reputations(&self, convicted: &[u8], false_accusers: &[u8]) {
        for seed in 1..9 {
            let (guilty, falsely) = self.reputation(seed);
            assert_eq!(guilty > 0, convicted.contains(&seed), "guilty: {seed}");
            let is_false = false_accusers.contains(&seed);
            assert_eq!(falsely > 0, is_false, "false accuser: {seed}");
        }
        self.replica();
    }
}

#[test]
fn a_verdict_counts_against_the_party_that_it_names_and_no_other() {
    for (finding, convicted, falsely) in [
        (Finding::Accused, &[4][..], &[][..]),
        (Finding::Witness, &[5], &[]),
        (Finding::Both, &[4, 5], &[]),
        (Finding::None, &[], &[7]),
    ] {
        let home = Home::with_judges();
        home.append(7, disputed(1, 4, Some(5)));
        home.assert_reputations(&[], &[]);
        home.append(2, judged(1, 7, finding));
        home.assert_reputations(convicted, falsely);
        let home = home.reopened();
        home.assert_reputations(convicted, falsely);
        assert_sound(&home.log);
        // A judge that withdraws opens the dispute again.
        home.append(2, judged(1, 7, Finding::Withdrawn));
        home.assert_reputations(&[], &[]);
    }
}

#[test]
fn only_anchors_judge_and_no_party_does() {
    let home = Home::with_judges();
    home.append(1, disputed(1, 4, Some(2)));
    // The founder accuses, anchor 2 is the witness.
    for (judge, code) in [
        (1, "unauthorized"),
        (2, "unauthorized"),
        (5, "unauthorized"),
        (8, "unauthorized"),
        (ROOT, "bad_request"),
    ] {
        let refused = home.refused(judge, judged(1, 1, Finding::Accused));
        assert_eq!(refused.code(), code, "judge {judge}");
    }
    home.refuses(3, judged(9, 1, Finding::Accused), "no_dispute");
    // Their events are stored if a peer sends them, and have no effect.
    let state = home.log.state();
    for judge in [2, 5, 8] {
        let mut judge = Author::after(90, judge);
        home.takes(&[judge.make(judged(1, 1, Finding::Accused))]);
    }
    assert_eq!(home.log.state(), state);
    home.append(3, judged(1, 1, Finding::Both));
    home.assert_reputations(&[2, 4], &[]);
}

#[test]
fn a_finding_about_a_witness_needs_one() {
    let home = Home::with_judges();
    home.append(7, disputed(1, 4, None));
    for finding in [Finding::Witness, Finding::Both, Finding::Withdrawn] {
        home.refuses(2, judged(1, 7, finding), "bad_request");
    }
    home.append(2, judged(1, 7, Finding::Accused));
    home.refuses(2, judged(1, 7, Finding::Accused), "bad_request");
    home.assert_reputations(&[4], &[]);
}

#[test]
fn judges_that_differ_leave_a_dispute_open_until_more_of_them_agree() {
    let home = Home::with_judges();
    home.append(7, disputed(1, 4, Some(5)));
    home.append(1, judged(1, 7, Finding::Accused));
    home.append(2, judged(1, 7, Finding::None));
    home.assert_reputations(&[], &[]);
    home.append(3, judged(1, 7, Finding::Accused));
    home.assert_reputations(&[4], &[]);
    // A judge may correct itself.
    home.append(3, judged(1, 7, Finding::None));
    home.assert_reputations(&[], &[7]);
    // The verdict of a judge that is revoked does not count.
    let seq = home.log.heads().authors[&id(3)].seq;
    home.append(ROOT, revoked(3, seq));
    home.assert_reputations(&[], &[]);
}

#[test]
fn a_false_accuser_and_a_convicted_host_cannot_accuse_and_a_convict_is_not_accused_again() {
    let home = Home::with_judges();
    home.append(7, disputed(1, 4, None));
    home.append(2, judged(1, 7, Finding::None));
    home.refuses(7, disputed(2, 4, None), "unauthorized");
    home.append(8, disputed(2, 4, None));
    home.append(2, judged(2, 8, Finding::Accused));
    for body in [disputed(3, 4, None), disputed(3, 5, Some(6))] {
        let author = if body == disputed(3, 4, None) { 8 } else { 4 };
        home.refuses(author, body, "bad_request");
    }
    home.assert_reputations(&[4], &[7]);
}

#[test]
fn strangers_neither_accuse_nor_are_accused_and_nobody_accuses_itself() {
    let home = Home::with_judges();
    for (author, body) in [
        (90, disputed(1, 4, None)),
        (7, disputed(1, 90, None)),
        (7, disputed(1, 4, Some(90))),
        (4, disputed(1, 4, None)),
        (5, disputed(1, 4, Some(5))),
    ] {
        home.refused(author, body);
    }
    assert_eq!(home.log.state().disputes().count(), 0);
}

#[test]
fn members_that_one_member_invited_share_their_open_disputes() {
    let home = Home::with_judges();
    home.append(1, open_policy());
    // Member 7 lets in a crowd, by a code of its own.
    home.append(7, invited(150, Level::Member, 20));
    for seed in 20..30 {
        home.append(1, admitted(150, seed, Level::Member));
    }
    for (n, accuser) in (0..).zip(20..24u8) {
        home.append(accuser, disputed(n, 4, Some(5)));
    }
    for accuser in [7, 24, 29] {
        home.refuses(accuser, disputed(40, 4, None), "dispute_limit");
    }
    // Others are not affected, and a decided dispute makes room.
    home.append(8, disputed(41, 4, None));
    home.append(2, judged(0, 20, Finding::None));
    home.append(24, disputed(42, 4, Some(5)));
    // However many accuse: open disputes have no consequence.
    home.assert_reputations(&[], &[]);
}

#[test]
fn a_member_that_fills_its_group_with_disputes_keeps_nobody_from_accusing() {
    let home = Home::with_judges();
    home.append(1, open_policy());
    home.append(7, invited(150, Level::Member, 20));
    for seed in [20, 21] {
        home.append(1, admitted(150, seed, Level::Member));
    }
    for n in 0..4 {
        home.append(20, disputed(n, 4, Some(5)));
    }
    home.refuses(20, disputed(4, 4, None), "dispute_limit");
    let open = |author: u8| {
        let state = home.log.state();
        let all = state.disputes().map(|(_, case)| case.accuser);
        all.filter(|accuser| *accuser == id(author)).count()
    };
    // Its oldest disputes give way, as long as it has more than any other accuser.
    home.append(7, disputed(5, 4, None));
    assert_eq!((open(20), open(7)), (3, 1));
    home.append(21, disputed(6, 4, None));
    assert_eq!((open(20), open(21)), (2, 1));
    home.append(1, revoked(20, 4));
    // Disputes of an accuser that is no longer a member do not count.
    home.append(7, disputed(7, 4, None));
    home.append(7, disputed(8, 4, None));
    assert_eq!((open(20), open(7), open(21)), (2, 3, 1));
}

#[test]
fn a_copied_evidence_does_not_take_the_place_of_the_dispute() {
    let home = Home::with_judges();
    home.append(8, disputed(1, 4, None));
    home.append(7, disputed(1, 4, None));
    assert_eq!(home.log.state().disputes().count(), 2);
    home.append(2, judged(1, 8, Finding::None));
    home.append(2, judged(1, 7, Finding::Accused));
    home.assert_reputations(&[4], &[8]);
}

#[test]
fn a_reputation_stays_when_a_node_leaves_and_comes_back() {
    let home = Home::with_judges();
    home.append(7, disputed(1, 4, None));
    home.append(2, judged(1, 7, Finding::Accused));
    home.append(4, Body::Left {});
    home.append(1, invited(160, Level::Trusted, 1));
    home.append(1, admitted(160, 4, Level::Trusted));
    home.assert_reputations(&[4], &[]);
}

#[test]
fn a_demoted_anchor_cannot_judge_in_the_past() {
    let (home, mut me, root) = two_anchors();
    home.takes(&[
        me.make(invited(150, Level::Trusted, 3)),
        me.make(admitted(150, 4, Level::Trusted)),
        me.make(admitted(150, 7, Level::Trusted)),
    ]);
    let mut accuser = Author::after(me.lamport, 7);
    home.takes(&[accuser.make(disputed(1, 4, None))]);
    let mut second = Author::after(accuser.lamport, 2);
    let verdict = second.make(judged(1, 7, Finding::Accused));
    home.takes(&[verdict]);
    assert_eq!(home.reputation(4), (1, 0));
    // The root has seen no event of the second anchor.
    let mut root = Author {
        lamport: second.lamport,
        ..root
    };
    home.takes(&[root.make(level_of(2, Level::Trusted, 0))]);
    assert_eq!(home.reputation(4), (0, 0));
    home.replica();
}

#[test]
fn a_reputation_comes_from_decided_disputes_and_judges_that_are_not_revoked() {
    let mut all = dispute::Cases::new();
    let case = |accuser: u8, finding: Option<Finding>| Case {
        time_ms: NOW,
        group: id(accuser),
        accuser: id(accuser),
        dispute: dispute(1, 4, None),
        verdicts: finding
            .map(|finding| (id(2), finding))
            .into_iter()
            .collect(),
    };
    all.insert(ByteArray::new([1; 32]), case(7, Some(Finding::None)));
    all.insert(ByteArray::new([2; 32]), case(8, None));
    let found = dispute::reputations(&all, |_| false);
    assert_eq!(found.len(), 1);
    assert!(found[&id(7)].is_false_accuser());
    assert!(dispute::reputations(&all, |judge| *judge == id(2)).is_empty());
}

#[test]
fn the_largest_dispute_fits_and_everything_beyond_its_limits_is_refused() {
    let home = Home::with_judges();
    home.append(
        7,
        Body::Disputed(Dispute {
            layers: (4095, 4095),
            evidence_bytes: MAX_SEALED_BYTES as u64,
            ..dispute(1, 4, Some(5))
        }),
    );
    let wrong: [fn(&mut Dispute); 7] = [
        |d| d.layers = (3, 2),
        |d| d.layers = (0, 4096),
        |d| d.witness = Some(d.accused),
        |d| d.receipts.clear(),
        |d| d.receipts.push([1; 32]),
        |d| d.evidence_bytes = 0,
        |d| d.evidence_bytes = MAX_SEALED_BYTES as u64 + 1,
    ];
    for change in wrong {
        let mut dispute = dispute(2, 4, Some(5));
        change(&mut dispute);
        let refused = home.refused(8, Body::Disputed(dispute.clone()));
        assert_eq!(refused.code(), "log_malformed", "{dispute:?}");
    }
}

#[test]
fn a_full_state_drops_its_oldest_open_dispute_and_no_decided_one() {
    let mut fold = fold::Fold::new(community());
    for seed in [4, 7, 8] {
        let member = Member {
            by: None,
            gave: None,
            name: String::new(),
            level: Level::Trusted,
            since_ms: 0,
            invite: None,
        };
        fold.state.members.insert(id(seed), member);
    }
    let stranger = id(90);
    let ids = (0..MAX_DISPUTES as u16).map(|n| {
        let mut id = [0; 32];
        id[..2].copy_from_slice(&n.to_be_bytes());
        ByteArray::new(id)
    });
    for (id, age) in ids.zip(0..) {
        let case = Case {
            time_ms: NOW - age,
            group: stranger,
            accuser: stranger,
            dispute: dispute(1, 4, None),
            verdicts: BTreeMap::new(),
        };
        fold.state.disputes.insert(id, case);
    }
    let oldest = *fold.state.disputes.last_key_value().unwrap().0;
    let event = Author::after(1, 7).draft(disputed(2, 4, None));
    fold.apply(&event).unwrap();
    assert_eq!(fold.state.disputes.len(), MAX_DISPUTES);
    assert!(!fold.state.disputes.contains_key(&oldest));
    for case in fold.state.disputes.values_mut() {
        case.verdicts.insert(id(1), Finding::None);
    }
    let event = Author::after(2, 8).draft(disputed(3, 4, None));
    assert_eq!(fold.apply(&event), Err(NoEffect::TooManyDisputes));
}
