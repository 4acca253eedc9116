//! Who waits to be known: how many connections there may be of peers that have not proved yet that
//! they belong here, and which of them goes when there are more. Time is an argument.
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
//! *Bound.* Half of the places are beyond the reach of addresses at which no member was. Somebody
//! there has to connect as often as there are places in the time of one handshake (32 times in some
//! 20 ms) to be in the way of a joiner, and cannot be in the way of a member.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::NodeId;

/// How long the address of a member is remembered: a lid may be closed for a night, and a lease of
/// DHCP usually lasts as long.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);
/// Most addresses that are: each of some 30 members has a few.
const MAX_REMEMBERED: usize = 256;

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
    last: u64,
    /// By age.
    waiting: BTreeMap<u64, Waiting>,
    /// Where members were, and when.
    members_at: HashMap<IpAddr, Instant>,
}

#[derive(Debug)]
struct Waiting {
    who: Who,
    kind: Kind,
    /// The key that it has proved, if it has, and that is nobody's who belongs here.
    key: Option<NodeId>,
    given_up: Arc<Notify>,
}

/// What is known of a newcomer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Who {
    At(IpAddr),
    Is(NodeId),
}

impl Who {
    /// Whom it counts with where there are too many.
    fn network(self) -> Who {
        let Who::At(address) = self else { return self };
        Who::At(match address {
            IpAddr::V4(v4) => {
                let [a, b, c, _] = v4.octets();
                [a, b, c, 0].into()
            }
            IpAddr::V6(v6) => Ipv6Addr::from(u128::from(v6) >> 64 << 64).into(),
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Somebody.
    Somebody,
    /// Somebody where a member was of late.
    Expected,
    /// A member.
    Member,
}

/// A place of one who waits; given back when dropped.
#[derive(Debug)]
pub(super) struct Newcomer {
    of: Arc<Newcomers>,
    id: u64,
    pub(super) address: IpAddr,
    given_up: Arc<Notify>,
}

impl Newcomers {
    pub(super) fn new(most: Most) -> Arc<Newcomers> {
        Arc::new(Newcomers {
            most,
            state: Mutex::default(),
        })
    }

    /// Looks again at those who have proved a key: whose is a member's now is in nobody's way.
    pub(super) fn look_again(&self, is_member: impl Fn(&NodeId) -> bool) {
        for one in self.state.lock().waiting.values_mut() {
            if let Some(key) = one.key.take_if(|key| is_member(key)) {
                (one.who, one.kind) = (Who::Is(key), Kind::Member);
            }
        }
    }

    /// A place for somebody who came from `address`, and has proved the key if there is one.
    pub(super) fn enter(
        self: &Arc<Self>,
        address: IpAddr,
        key: Option<NodeId>,
        now: Instant,
    ) -> Newcomer {
        let mut state = self.state.lock();
        let seen = state.members_at.get(&address);
        let kind = match seen.is_some_and(|seen| now.duration_since(*seen) < REMEMBERED) {
            true => Kind::Expected,
            false => Kind::Somebody,
        };
        let (id, given_up) = (state.last, Arc::<Notify>::default());
        state.last += 1;
        let waiting = Waiting {
            who: Who::At(address),
            kind,
            key,
            given_up: Arc::clone(&given_up),
        };
        state.waiting.insert(id, waiting);
        state.make_room(&self.most, Who::At(address));
        Newcomer {
            of: Arc::clone(self),
            id,
            address,
            given_up,
        }
    }
}

impl State {
    /// Gives up those who are too many, now that `who` has come.
    fn make_room(&mut self, most: &Most, who: Who) {
        let count = |kind| self.waiting.values().filter(|one| one.kind == kind).count();
        let own = self.waiting.values().filter(|one| one.who == who).count();
        let [somebody, expected, members] =
            [Kind::Somebody, Kind::Expected, Kind::Member].map(count);
        let victim = if own > most.each {
            self.first(|one| one.who == who)
        } else if somebody > most.somebody {
            self.first(|one| one.kind == Kind::Somebody)
        } else if somebody + expected > most.all {
            self.first(|one| one.kind != Kind::Member)
        } else if members > most.all {
            self.first(|one| one.kind == Kind::Member)
        } else {
            None
        };
        if let Some(one) = victim.and_then(|id| self.waiting.remove(&id)) {
            one.given_up.notify_one();
        }
    }

    /// Of those in question, the one to go first.
    fn first(&self, in_question: impl Fn(&Waiting) -> bool) -> Option<u64> {
        let all = || self.waiting.iter().filter(|(_, one)| in_question(one));
        let (mut in_network, mut of_each) = (HashMap::new(), HashMap::new());
        for (_, one) in all() {
            *in_network.entry(one.who.network()).or_insert(0) += 1;
            *of_each.entry(one.who).or_insert(0) += 1;
        }
        let weight = |one: &Waiting| (in_network.get(&one.who.network()), of_each.get(&one.who));
        // Of equals the last of the reversed order, which is the oldest.
        all()
            .rev()
            .max_by_key(|(_, one)| weight(one))
            .map(|(id, _)| *id)
    }
}

impl Newcomer {
    /// Resolves when the place is needed for somebody else, or has been given back.
    pub(super) fn given_up(&self) -> impl Future<Output = ()> + Send + use<> {
        let given_up = Arc::clone(&self.given_up);
        async move { given_up.notified().await }
    }

    /// It has proved to be a member: it waits among these from here on, and its address is one at
    /// which members are.
    pub(super) fn is_member(&self, key: NodeId, now: Instant) {
        let mut state = self.of.state.lock();
        let State {
            waiting,
            members_at,
            ..
        } = &mut *state;
        // Otherwise it was given up meanwhile.
        let Some(one) = waiting.get_mut(&self.id) else {
            return;
        };
        if let Who::At(address) = one.who {
            if members_at.len() >= MAX_REMEMBERED
                && !members_at.contains_key(&address)
                && let Some(oldest) = members_at.iter().min_by_key(|(_, seen)| **seen)
            {
                let oldest = *oldest.0;
                members_at.remove(&oldest);
            }
            members_at.insert(address, now);
        }
        (one.who, one.kind) = (Who::Is(key), Kind::Member);
        state.make_room(&self.of.most, Who::Is(key));
    }
}

impl Drop for Newcomer {
    fn drop(&mut self) {
        self.of.state.lock().waiting.remove(&self.id);
        self.given_up.notify_one();
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
        places.enter(address, None, Instant::now())
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
        let [a, b, c] = [(); 3].map(|()| enter(&places, v4(0, 1)));
        assert_eq!([&a, &b, &c].map(waits), [false, true, true]);
        assert!(a.given_up().now_or_never().is_some());
        assert!(b.given_up().now_or_never().is_none());
        let gone = b.given_up();
        drop(b);
        assert!(gone.now_or_never().is_some());
    }

    #[test]
    fn a_crowd_elsewhere_cannot_reach_the_places_of_addresses_where_members_were() {
        let places = places(8, 8);
        let home: Vec<IpAddr> = (0..8).map(|n| v4(0, n)).collect();
        for (n, address) in (0..).zip(&home) {
            enter(&places, *address).is_member(key(n), Instant::now());
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
        // And nobody is expected for ever.
        let later = Instant::now() + REMEMBERED;
        let at = places.enter(home[0], None, later);
        assert_eq!(places.state.lock().waiting[&at.id].kind, Kind::Somebody);
    }

    #[test]
    fn a_member_is_in_the_way_of_itself_alone() {
        let places = places(8, 2);
        let as_member = |n: u8| {
            let one = enter(&places, v4(0, n));
            one.is_member(key(n), Instant::now());
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
    fn a_stranger_that_has_become_a_member_gives_way_to_no_stranger() {
        let places = places(4, 2);
        let of_key = |n: u8| places.enter(v4(n, 1), Some(key(n)), Instant::now());
        let (joined, other) = (of_key(1), of_key(2));
        places.look_again(|one| *one == key(1));
        let more: Vec<Newcomer> = (3..9).map(of_key).collect();
        assert!(waits(&joined) && !waits(&other));
        assert_eq!(more.iter().filter(|one| waits(one)).count(), 2);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let places = places(8, 2);
        for n in 0..=u8::MAX {
            enter(&places, v4(1, n)).is_member(key(1), Instant::now());
            enter(&places, v4(2, n)).is_member(key(1), Instant::now());
        }
        assert_eq!(places.state.lock().members_at.len(), MAX_REMEMBERED);
    }

    #[test]
    fn networks_are_those_of_a_home() {
        let at = |text: &str| Who::At(text.parse().unwrap()).network();
        assert_eq!(at("192.168.1.7"), at("192.168.1.250"));
        assert_ne!(at("192.168.1.7"), at("192.168.2.7"));
        assert_eq!(at("fd00::1:2:3:4"), at("fd00::9"));
        assert_ne!(at("fd00:0:0:1::1"), at("fd00:0:0:2::1"));
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
                    one.is_member(key(host), Instant::now());
                    prop_assert!(waits(&one));
                }
                if !leaves {
                    here.push(one);
                }
                let state = places.state.lock();
                let count = |kinds: &[Kind]| {
                    state.waiting.values().filter(|one| kinds.contains(&one.kind)).count()
                };
                prop_assert!(count(&[Kind::Somebody]) <= 4);
                prop_assert!(count(&[Kind::Somebody, Kind::Expected]) <= 8);
                prop_assert!(count(&[Kind::Member]) <= 8);
            }
            drop(here);
            prop_assert!(places.state.lock().waiting.is_empty());
        }
    }
}
