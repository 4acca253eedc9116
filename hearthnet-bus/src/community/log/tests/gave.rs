//! Counters of what members gave.

use super::*;

/// Time at which these tests receive events.
const LATER: u64 = NOW + 40 * DAY;

/// Event of an author, made a number of days after [`NOW`].
fn made(author: &mut Author, after: u64, gave: Gave) -> Vec<u8> {
    author.sign(&Event {
        time_ms: NOW + after * DAY,
        ..author.draft(Body::NodeGave(gave))
    })
}

#[track_caller]
fn take(home: &Home, raw: &[Vec<u8>]) {
    assert_eq!(codes(&home.log, raw, LATER), [""; 0]);
}

fn shown(home: &Home, seed: u8) -> Option<Gave> {
    home.log.state().member(&id(seed)).unwrap().gave
}

#[test]
fn the_last_counters_of_each_member_are_the_same_in_every_order_of_arrival() {
    let home = Home::new();
    home.admit(2, Level::Member);
    home.admit(3, Level::Trusted);
    let before = home.log.state().state_hash();
    let other = home.replica();
    let (mut two, mut three) = (Author::after(90, 2), Author::after(90, 3));
    let mut raw = vec![];
    for after in 1..8 {
        raw.push(made(&mut two, after, gave(after)));
        raw.push(made(&mut three, after + 1, gave(after)));
    }
    take(&home, &raw);
    raw.reverse();
    for event in &raw {
        take(&other, std::slice::from_ref(event));
    }
    home.assert_same(&other);
    assert_eq!(shown(&home, 2), Some(gave(7)));
    assert_eq!(shown(&home, 3), Some(gave(7)));
    assert_ne!(home.log.state().state_hash(), before);
    assert_sound(&home.log);
    let home = home.reopened();
    assert_eq!(shown(&home, 2), Some(gave(7)));
}

#[test]
fn counters_that_do_not_continue_the_earlier_ones_have_no_effect() {
    let five = gave(5);
    // Days between the start and the event, days of the counters beyond the fifth, then the counters:
    // tokens, minutes and bytes. The fifth day ends with 5000, 300 and 25,000.
    let without = [
        ("the same day", 6, 0, [9000, 300, 25_000]),
        ("an earlier day", 6, -1, [9000, 300, 25_000]),
        ("a day that has not come", 6, 2, [9000, 300, 25_000]),
        ("nothing more", 6, 1, [5000, 300, 25_000]),
        ("fewer tokens", 6, 1, [4999, 400, 25_000]),
        ("fewer minutes", 6, 1, [9000, 299, 25_000]),
        ("fewer bytes", 6, 1, [9000, 300, 0]),
        ("a day of 25 hours", 6, 1, [5000, 300 + 1441, 25_000]),
        ("two days of 25 hours", 7, 2, [5000, 300 + 2881, 25_000]),
    ];
    for (what, after, days, [tokens, minutes, weights_bytes]) in without {
        let next = Gave {
            day: five.day.saturating_add_signed(days),
            tokens,
            minutes,
            weights_bytes,
        };
        let home = Home::new();
        home.admit(2, Level::Member);
        let mut two = Author::after(90, 2);
        let first = made(&mut two, 5, five);
        take(&home, &[first]);
        let state = home.log.state();
        take(&home, &[made(&mut two, after, next)]);
        assert_eq!(home.log.state(), state, "{what}");
        // A later event with true counters has its effect all the same.
        take(&home, &[made(&mut two, 9, gave(9))]);
        assert_eq!(shown(&home, 2), Some(gave(9)), "{what}");
    }
    let home = Home::new();
    let today = |gave| {
        Body::NodeGave(Gave {
            day: NOW / DAY,
            ..gave
        })
    };
    home.append(1, today(gave(1)));
    let again = home.refused(1, today(gave(2)));
    assert_eq!(again.code(), "bad_request");
    assert!(matches!(
        again,
        LogError::NoEffect(NoEffect::GaveNothingNew(_))
    ));
}

#[test]
fn counters_cover_no_day_before_the_admission() {
    let home = Home::new();
    home.admit(2, Level::Member);
    let mut two = Author::after(90, 2);
    let before = Gave {
        day: NOW / DAY - 1,
        ..gave(1)
    };
    let full = Gave {
        minutes: 1440,
        ..gave(0)
    };
    let more = Gave {
        minutes: 1441,
        ..full
    };
    take(&home, &[made(&mut two, 1, before), made(&mut two, 1, more)]);
    assert_eq!(shown(&home, 2), None);
    take(&home, &[made(&mut two, 1, full)]);
    assert_eq!(shown(&home, 2), Some(full));
}

#[test]
fn the_largest_counters_are_shown_and_larger_ones_and_those_of_strangers_are_not() {
    let home = Home::new();
    home.admit(2, Level::Member);
    let largest = Gave {
        tokens: MAX_NUMBER,
        weights_bytes: MAX_NUMBER,
        ..gave(1)
    };
    let (mut two, mut stranger) = (Author::after(90, 2), Author::after(90, 9));
    take(
        &home,
        &[made(&mut two, 1, largest), made(&mut stranger, 1, largest)],
    );
    assert_eq!(shown(&home, 2), Some(largest));
    home.refuses(9, Body::NodeGave(gave(0)), "unauthorized");
    let changes: [fn(&mut Gave); 4] = [
        |it| it.day = MAX_NUMBER + 1,
        |it| it.tokens += 1,
        |it| it.minutes = u64::MAX,
        |it| it.weights_bytes += 1,
    ];
    for change in changes {
        let mut it = largest;
        change(&mut it);
        let sent = Body::Unknown {
            kind: "node.gave".into(),
            slot: None,
            bytes: Body::NodeGave(it).encode().unwrap(),
        };
        let refused = Event::verify(&founder().make(sent)).unwrap_err();
        assert_eq!(refused.code(), "log_malformed");
    }
    // Every larger day up to the largest number: none has come.
    let far = Gave {
        day: MAX_NUMBER,
        tokens: 1,
        ..largest
    };
    assert!(!far.follows(None, NOW, LATER));
}

#[test]
fn a_member_that_leaves_begins_at_zero_and_a_revoked_one_writes_nothing_into_the_past() {
    let home = Home::new();
    home.admit(2, Level::Member);
    let say = |seed: u8, body: Body, after: u64| {
        home.log
            .append(&key(seed), body, NOW + after * DAY)
            .unwrap();
    };
    say(2, Body::NodeGave(gave(3)), 4);
    say(2, Body::Left {}, 4);
    let again = Body::Invited {
        invite: id(60),
        level: Level::Member,
        uses: 1,
        expires_ms: NOW + 9 * DAY,
    };
    say(1, again, 4);
    say(1, admitted(60, 2, Level::Member), 4);
    assert_eq!(shown(&home, 2), None);
    let small = Gave {
        tokens: 1,
        minutes: 0,
        weights_bytes: 0,
        ..gave(4)
    };
    say(2, Body::NodeGave(small), 5);
    assert_eq!(shown(&home, 2), Some(small));

    let home = Home::new();
    home.admit(2, Level::Trusted);
    let other = home.replica();
    let mut two = Author::after(90, 2);
    let seen = made(&mut two, 2, gave(1));
    let mut root = home.root_after(200);
    let lost = root.make(level_of(2, Level::Member, 1));
    let revocation = root.make(revoked(2, 1));
    let backdated = made(&mut two, 3, gave(2));
    // A member of any level may count, so a demotion changes nothing.
    take(&home, &[seen.clone(), lost.clone(), backdated.clone()]);
    assert_eq!(shown(&home, 2), Some(gave(2)));
    take(&home, std::slice::from_ref(&revocation));
    take(&other, &[revocation, backdated, lost, seen]);
    assert!(home.log.state().member(&id(2)).is_none());
    home.assert_same(&other);
}

#[test]
fn counters_that_come_late_are_not_reported_as_backdated() {
    let home = Home::new();
    home.admit(2, Level::Trusted);
    let mut two = Author::after(3, 2);
    // Node 1 writes at the same moment, as all nodes do after midnight.
    home.append(1, policy(true));
    home.append(1, policy(false));
    take(&home, &[made(&mut two, 1, gave(1))]);
    assert_eq!(shown(&home, 2), Some(gave(1)));
    // The root has not seen the counters either.
    home.append(ROOT, level_of(2, Level::Member, 0));
    let found = home.log.verify().unwrap();
    assert_eq!((found.late.len(), found.void.len()), (0, 0), "{found:?}");
    assert!(home.log.dated_back().unwrap().is_empty());
    // An event with an effect on others is.
    take(&home, &[two.make(invited(70, Level::Member, 1))]);
    assert_eq!(home.log.dated_back().unwrap().len(), 1);
}

#[test]
fn a_node_announces_whole_days_once_and_as_many_minutes_as_they_have() {
    let today = |after: u64| NOW + after * DAY;
    let counted = Gave {
        tokens: 10,
        minutes: 5000,
        ..Gave::default()
    };
    // The event has no effect on the day of the admission, or without counts.
    assert_eq!(Gave::next(counted, None, NOW, NOW), None);
    assert_eq!(Gave::next(Gave::default(), None, NOW, today(3)), None);
    let first = Gave::next(counted, None, NOW, today(1)).unwrap();
    let expected = Gave {
        day: NOW / DAY,
        tokens: 10,
        minutes: 1440,
        weights_bytes: 0,
    };
    assert_eq!(first, expected);
    let more = Gave {
        tokens: 11,
        ..counted
    };
    assert_eq!(Gave::next(more, Some(&first), NOW, today(1)), None);
    // The clock was set back.
    assert_eq!(Gave::next(more, Some(&first), NOW, NOW - 9 * DAY), None);
    let third = Gave::next(more, Some(&first), NOW, today(3)).unwrap();
    assert_eq!((third.day, third.minutes), (NOW / DAY + 2, 1440 + 2880));
    // Lost counters: the announced ones stay.
    assert_eq!(
        Gave::next(Gave::default(), Some(&third), NOW, today(9)),
        None
    );
}
