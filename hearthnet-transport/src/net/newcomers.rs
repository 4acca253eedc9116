//! Who waits to be known: how many connections there may be of peers that have not proved yet that
//! they belong here, and which of them goes when there are more.
//!
//! Whoever connects may be anybody. So nobody is turned away for those who came before: where there
//! are as many as may be, one that waits already is *given up* for the new one. It is the oldest of
//! the address with most places, in the *network* (an IPv4 /24, an IPv6 /64) with most. An honest peer
//! holds its place for the milliseconds that a handshake takes; one that is silent holds it for
//! seconds, and is the oldest before long.
//!
//! ```text
//!            connects                       proves a member's key
//!  somebody ----------> [ by address ] ------------------------------> [ by key ] ----> open
//!                       half of the places are kept for addresses       as many again
//!                       at which members were of late
//! ```
//!
//! A home is one network, and all of its members may come at once, when a node starts: so a network
//! may have all places that are free, and only loses them to others.
//!
//! A member that connects too often is refused after its TLS handshake, which is what it costs. So
//! connections from the address of such a member *rest* for a second before theirs begins: there are as
//! many handshakes a second as places of one address, and what is given up meanwhile costs nothing.
//!
//! *Bound.* Half of the places are beyond the reach of addresses at which no member was. Somebody
//! there has to connect as often as there are places in the time of one handshake (32 times in some
//! 20 ms) to be in the way of a joiner, and cannot be in the way of a member.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use crate::NodeId;

/// Most addresses of members that are remembered: each of some 30 members has a few.
const REMEMBERED: usize = 256;

/// For how long connections rest that come from the address of a member that connects too often.
const REST: Duration = Duration::from_secs(1);
/// Most addresses that are remembered for it.
const MAX_SLOWED: usize = 256;

/// How many of them there may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Most {
    /// From addresses at which no member was.
    pub(super) somebody: usize,
    /// From all addresses; and as many members.
    pub(super) all: usize,
    /// From one address, or of one member.
    pub(super) each: usize,
}

/// The places of those who wait.
#[derive(Debug)]
pub(super) struct Newcomers {
    most: Most,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// By age.
    waiting: BTreeMap<u64, Waiting>,
    /// Where members were, the latest last.
    members_at: VecDeque<IpAddr>,
    /// Addresses of members that connect too often, and since when; the latest last.
    slowed: VecDeque<(IpAddr, Instant)>,
}

#[derive(Debug)]
struct Waiting {
    who: Who,
    /// It is a member, or one was at its address of late.
    expected: bool,
    /// Its other end hears when this is dropped.
    _place: oneshot::Sender<()>,
}

/// What is known of a newcomer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    At(IpAddr),
    Is(NodeId),
}

impl Who {
    /// Whom it counts with where there are too many.
    fn network(self) -> Who {
        let Who::At(address) = self else { return self };
        Who::At(match subscriber(address) {
            IpAddr::V4(v4) => {
                let [a, b, c, _] = v4.octets();
                [a, b, c, 0].into()
            }
            v6 => v6,
        })
    }
}

/// Whom an address counts with where one may have so many of something: an IPv4 address alone, an IPv6
/// address with its /64, of which whoever has one address takes as many as it likes.
pub fn subscriber(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from(u128::from(v6) >> 64 << 64).into(),
        v4 => v4,
    }
}

/// A place of one who waits; given back when dropped.
#[derive(Debug)]
pub(crate) struct Newcomer {
    of: Arc<Newcomers>,
    id: u64,
    pub(super) address: IpAddr,
}

/// Resolves, to an error, when a place is needed for somebody else or has been given back.
pub(super) type GivenUp = oneshot::Receiver<()>;

impl Newcomers {
    pub(super) fn new(most: Most) -> Arc<Newcomers> {
        Arc::new(Newcomers {
            most,
            state: Mutex::default(),
        })
    }

    /// A place for somebody who came from `address`.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> (Newcomer, GivenUp) {
        let (place, given_up) = oneshot::channel();
        let mut state = self.state.lock();
        let (id, who) = (state.next, Who::At(address));
        state.next += 1;
        let waiting = Waiting {
            who,
            expected: state.members_at.contains(&address),
            _place: place,
        };
        state.waiting.insert(id, waiting);
        state.make_room(&self.most, who);
        let of = Arc::clone(self);
        (Newcomer { of, id, address }, given_up)
    }
}

impl State {
    /// Gives up who is one too many, now that `who` has come.
    fn make_room(&mut self, most: &Most, who: Who) {
        let is_member = |one: &Waiting| matches!(one.who, Who::Is(_));
        let bounds = [most.each, most.somebody, most.all, most.all];
        let counted: [&dyn Fn(&Waiting) -> bool; 4] = [
            &|one| one.who == who,
            &|one| !one.expected,
            &|one| !is_member(one),
            &is_member,
        ];
        for (most, counts) in bounds.into_iter().zip(counted) {
            let all = || self.waiting.iter().filter(|(_, one)| counts(one));
            if all().count() <= most {
                continue;
            }
            let with = |one: &Waiting, of: fn(Who) -> Who| {
                let same = |(_, other): &(&u64, &Waiting)| of(other.who) == of(one.who);
                all().filter(same).count()
            };
            let weight = |one: &Waiting| (with(one, Who::network), with(one, |who| who));
            let first = all().max_by_key(|(id, one)| (weight(one), Reverse(**id)));
            if let Some(first) = first.map(|(id, _)| *id) {
                self.waiting.remove(&first);
            }
        }
    }
}

impl Newcomer {
    /// It has proved to be a member, or that it is about to be one: it waits among these from here on,
    /// and its address is one at which members are.
    pub(super) fn known_as(&self, key: NodeId) {
        let mut state = self.of.state.lock();
        // Otherwise it was given up meanwhile.
        let Some(one) = state.waiting.get_mut(&self.id) else {
            return;
        };
        (one.who, one.expected) = (Who::Is(key), true);
        state.members_at.retain(|at| *at != self.address);
        state.members_at.push_back(self.address);
        if state.members_at.len() > REMEMBERED {
            state.members_at.pop_front();
        }
        state.make_room(&self.of.most, Who::Is(key));
    }
}

impl Newcomer {
    /// The member has connected too often: its address is slowed down from here on.
    pub(super) fn slow_down(&self) {
        let mut state = self.of.state.lock();
        state.slowed.retain(|(at, _)| *at != self.address);
        state.slowed.push_back((self.address, Instant::now()));
        if state.slowed.len() > MAX_SLOWED {
            state.slowed.pop_front();
        }
    }

    /// Waits, if its address is slowed down.
    pub(super) async fn rest(&self) {
        let now = Instant::now();
        let is_slowed = {
            let state = self.of.state.lock();
            let mut slowed = state.slowed.iter();
            slowed.any(|(at, since)| *at == self.address && now < *since + REST)
        };
        if is_slowed {
            sleep_until(now + REST).await;
        }
    }
}

impl Drop for Newcomer {
    fn drop(&mut self) {
        self.of.state.lock().waiting.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use proptest::prelude::*;

    use super::*;

    fn v4(network: u8, host: u8) -> IpAddr {
        [10, 0, network, host].into()
    }

    fn key(n: u8) -> NodeId {
        NodeId::from_checked([n; 32])
    }

    fn waits(one: &Newcomer) -> bool {
        one.of.state.lock().waiting.contains_key(&one.id)
    }

    fn enter(places: &Arc<Newcomers>, address: IpAddr) -> Newcomer {
        places.enter(address).0
    }

    /// Half of the places are for addresses at which members were.
    fn places(all: usize, each: usize) -> Arc<Newcomers> {
        let somebody = all / 2;
        Newcomers::new(Most {
            somebody,
            all,
            each,
        })
    }

    #[test]
    fn silent_connections_of_four_addresses_keep_nobody_of_the_same_network_out() {
        let places = places(64, 16);
        let silent = (0..64).map(|n| enter(&places, v4(0, 200 + n / 16)));
        let silent: Vec<Newcomer> = silent.collect();
        assert_eq!(silent.iter().filter(|one| waits(one)).count(), 32);
        let members: Vec<Newcomer> = (0..30).map(|n| enter(&places, v4(0, n))).collect();
        assert!(members.iter().all(waits));
        // And however often the silent ones come again, from as many addresses.
        for n in 0..1000 {
            drop(enter(&places, v4(0, 200 + (n % 4) as u8)));
        }
        assert!(members.iter().all(waits));
    }

    #[test]
    fn of_one_address_the_oldest_makes_room() {
        let places = places(64, 2);
        let [mut a, mut b, c] = [(); 3].map(|()| places.enter(v4(0, 1)));
        assert_eq!([&a.0, &b.0, &c.0].map(waits), [false, true, true]);
        assert!((&mut a.1).now_or_never().is_some());
        assert!((&mut b.1).now_or_never().is_none());
        drop(b.0);
        assert!(b.1.now_or_never().is_some());
    }

    #[test]
    fn a_crowd_elsewhere_cannot_reach_the_places_of_addresses_where_members_were() {
        let places = places(8, 8);
        let home: Vec<IpAddr> = (0..8).map(|n| v4(0, n)).collect();
        for (n, address) in (0..).zip(&home) {
            enter(&places, *address).known_as(key(n));
        }
        let expected: Vec<Newcomer> = home[..4].iter().map(|at| enter(&places, *at)).collect();
        let crowd: Vec<_> = (0..200)
            .map(|n| enter(&places, v4(1 + n % 100, n)))
            .collect();
        assert_eq!(crowd.iter().filter(|one| waits(one)).count(), 4);
        assert!(expected.iter().all(waits));
        // What the crowd does not need is theirs as well.
        drop(crowd);
        let more: Vec<Newcomer> = home[4..].iter().map(|at| enter(&places, *at)).collect();
        assert!(expected.iter().chain(&more).all(waits));
    }

    #[test]
    fn a_member_is_in_the_way_of_itself_alone() {
        let places = places(8, 2);
        let as_member = |n: u8| {
            let one = enter(&places, v4(0, n));
            one.known_as(key(n));
            one
        };
        let greedy: Vec<Newcomer> = (0..20).map(|_| as_member(0)).collect();
        assert_eq!(greedy.iter().filter(|one| waits(one)).count(), 2);
        let others: Vec<Newcomer> = (1..7).map(as_member).collect();
        assert!(others.iter().all(waits));
        let last = as_member(9);
        assert!(others.iter().chain([&last]).all(waits));
        assert_eq!(greedy.iter().filter(|one| waits(one)).count(), 1);
    }

    #[test]
    fn a_stranger_that_is_invited_gives_way_to_no_stranger() {
        let places = places(4, 2);
        let [invited, other] = [1, 2].map(|n| enter(&places, v4(n, 1)));
        invited.known_as(key(1));
        let more: Vec<Newcomer> = (3..9).map(|n| enter(&places, v4(n, 1))).collect();
        assert!(waits(&invited) && !waits(&other));
        assert_eq!(more.iter().filter(|one| waits(one)).count(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn connections_from_the_address_of_a_member_that_comes_too_often_rest_for_a_second() {
        let places = places(8, 2);
        let greedy = enter(&places, v4(0, 1));
        greedy.known_as(key(1));
        greedy.slow_down();
        let begin = Instant::now();
        enter(&places, v4(0, 2)).rest().await;
        assert_eq!(begin.elapsed(), Duration::ZERO);
        enter(&places, v4(0, 1)).rest().await;
        assert_eq!(begin.elapsed(), REST);
        enter(&places, v4(0, 1)).rest().await;
        assert_eq!(begin.elapsed(), REST, "that is over");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let places = places(8, 2);
        for n in 0..=u8::MAX {
            enter(&places, v4(1, n)).known_as(key(1));
            enter(&places, v4(2, n)).known_as(key(1));
        }
        // The latest are: nobody is expected for ever.
        let state = places.state.lock();
        assert_eq!(state.members_at.len(), REMEMBERED);
        assert_eq!(state.members_at.front(), Some(&v4(1, 128)));
    }

    #[test]
    fn networks_are_those_of_a_home() {
        let at = |text: &str| Who::At(text.parse().unwrap()).network();
        assert_eq!(at("192.168.1.7"), at("192.168.1.250"));
        assert_ne!(at("192.168.1.7"), at("192.168.2.7"));
        assert_eq!(at("fd00::1:2:3:4"), at("fd00::9"));
        assert_ne!(at("fd00:0:0:1::1"), at("fd00:0:0:2::1"));
    }

    #[test]
    fn who_has_an_ipv6_address_has_its_network_and_who_has_an_ipv4_address_has_that() {
        let of = |text: &str| subscriber(text.parse().unwrap()).to_string();
        assert_eq!(of("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!(of("192.168.1.7"), "192.168.1.7");
        assert_eq!(of("::ffff:192.168.1.7"), "192.168.1.7");
    }

    proptest! {
        #[test]
        fn there_are_never_more_than_may_be(
            arrivals in prop::collection::vec((0u8..4, 0u8..12, any::<bool>(), any::<bool>()), 0..200),
        ) {
            let places = places(8, 3);
            let mut here = Vec::new();
            for (network, host, member, leaves) in arrivals {
                let one = enter(&places, v4(network, host));
                prop_assert!(waits(&one), "who comes has a place");
                if member {
                    one.known_as(key(host));
                    prop_assert!(waits(&one));
                }
                if !leaves {
                    here.push(one);
                }
                let state = places.state.lock();
                let members = state.waiting.values().filter(|one| matches!(one.who, Who::Is(_)));
                let members = members.count();
                prop_assert!(state.waiting.values().filter(|one| !one.expected).count() <= 4);
                prop_assert!(state.waiting.len() - members <= 8 && members <= 8);
            }
            drop(here);
            prop_assert!(places.state.lock().waiting.is_empty());
        }
    }
}
