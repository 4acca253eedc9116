//! Silent hosts at the default settings: stopped, behind a pulled cable, or dead while a chat
//! connects; and hosts that are only slow. The tests print how long an answer paused:
//!
//! ```text
//! cargo test -p hearthnet --test program -- failover::silence:: --nocapture
//! ```

use hearthnet_orchestrator::ChatError;
use hearthnet_orchestrator::chat::Prompt;
use hearthnet_orchestrator::hosts::HostPool;
use hearthnet_orchestrator::link::HostAddr;
use hearthnet_testkit::lab::Lab;

use super::*;
use crate::support::caller::same;
use crate::support::*;

/// Maximum pause of an answer if only this machine can replace a silent host.
const MOST_SILENCE: Duration = Duration::from_secs(6);

/// Prints how long an answer paused.
fn stood_still(what: &str, heard: &Heard) {
    println!(
        "{what}: stood still for {:.2} s",
        heard.longest.as_secs_f64()
    );
}

#[test]
fn a_host_stopped_in_the_prompt_or_the_answer_is_replaced_by_its_spare() {
    let scene = Scene::new();
    let mut fleet = Fleet::new(&scene.caller, 2);
    // Positions 0 and 1 come before the host was measured, 20 comes after.
    for (victim, position) in [(0, 0), (1, 0), (0, 1), (1, 1), (0, 20), (1, 20)] {
        let what = format!("host {victim} stops at token {position}");
        let mut struck = String::new();
        let (_, heard) = scene.ask(&fleet.addresses(), false, &what, |token, route| {
            if token == position {
                struck.clone_from(&route[victim]);
                fleet.strike(&struck, Fault::Stop);
            }
        });
        stood_still(&what, &heard);
        match position {
            0 => assert_eq!(heard.degraded, ["silent"], "{what}"),
            // The measured history of a host can report it as slow before its silence counts as a
            // failure.
            _ => assert_eq!(heard.degraded.len(), 1, "{what}"),
        }
        assert_eq!(heard.recoveries.len(), 1, "{what}");
        assert!(heard.waits.contains(&"silent".into()), "{what}");
        fleet.mend(&scene.caller, &struck, Fault::Stop);
    }
}

#[test]
fn a_host_stopped_in_a_long_prompt_is_replaced_by_its_spare() {
    let mut long = usual();
    let text = "The keeper of the lighthouse wrote down the weather of the day. ".repeat(40);
    long.prompt = Prompt::Messages(vec![hearthnet_tokens::ChatMessage::user(text)]);
    let scene = Scene::of(caller_with((2, 0)), long);
    let fleet = Fleet::new(&scene.caller, 2);
    let what = "in the middle of the prompt";
    let (_, heard) = std::thread::scope(|scope| {
        let (begin, begun) = std::sync::mpsc::channel::<String>();
        let fleet = &fleet;
        scope.spawn(move || {
            let node = begun.recv().expect("the route");
            // Any moment within the prompt.
            std::thread::sleep(Duration::from_millis(100));
            fleet.strike(&node, Fault::Stop);
        });
        scene.ask(&fleet.addresses(), false, what, |token, route| {
            if token == 0 {
                begin.send(route[1].clone()).expect("it waits");
            }
        })
    });
    stood_still(what, &heard);
    assert_eq!(heard.degraded.len(), 1);
    assert_eq!(heard.recoveries.len(), 1);
}

#[test]
fn a_silent_host_without_a_replacement_is_waited_for_visibly() {
    let scene = Scene::new();
    let fleet = Fleet::new(&scene.caller, 1);
    let mut conversation = scene.open(&fleet.addresses(), false);
    let host = fleet.0[1].process.child.id();
    let mut heard = Heard {
        // The host resumes once the caller has reported that it waits for it.
        on_wait: Some(Box::new(move || {
            let pid = pid(host);
            rustix::process::kill_process(pid, Signal::CONT).expect("it is stopped");
        })),
        ..Heard::default()
    };
    let at = |token: u32, _: &[String]| {
        if token == 6 {
            stop(&fleet.0[1]);
        }
    };
    let result = scene
        .caller
        .answer(&mut conversation, &usual(), &mut heard, at);
    same(result, &heard, &scene.undisturbed, "stopped for a while");
    assert!(heard.waits.contains(&"silent".into()), "{:?}", heard.waits);
    assert_eq!(heard.degraded, [""; 0], "it was waited for");
}

#[test]
fn a_silent_host_is_replaced_locally_after_a_short_wait() {
    let scene = Scene::new();
    let fleet = Fleet::new(&scene.caller, 1);
    let what = "silent, and no spare";
    let (_, heard) = std::thread::scope(|scope| {
        let fleet = &fleet;
        scene.ask(&fleet.addresses(), true, what, |token, route| {
            if token == 6 {
                fleet.strike(&route[1], Fault::Stop);
                let stopped = &fleet.0[fleet.place(&route[1])];
                scope.spawn(move || {
                    // This sleep is the pause under test; afterwards the host is too late.
                    std::thread::sleep(MOST_SILENCE);
                    stopped.signal(Signal::CONT);
                });
            }
        })
    });
    stood_still(what, &heard);
    // Not the code of a host that reached the health timeout.
    assert_eq!(heard.degraded, ["silent"]);
    assert!(heard.local);
}

/// Answer of three tokens: enough for a prompt and the steps behind it.
fn short() -> ChatRequest {
    ChatRequest {
        max_tokens: Some(3),
        ..usual()
    }
}

#[test]
fn honestly_slow_hosts_are_kept() {
    // Two prompt chunks and two tokens at 2.5 s each, without earlier measurements and close to the
    // health timeout.
    let slow = Lie::Slow(Duration::from_millis(2500));
    let scene = Scene::of(Caller::new(u32::MAX, Duration::from_secs(9)), short());
    let (_first, first) = liar(&scene.caller, slow, 0, 0..15);
    let (_second, second) = liar(&scene.caller, slow, 0, 15..30);
    let (_spare, spare) = liar(&scene.caller, slow, 0, 15..30);
    let fast = scene.caller.host(RANGES[0], &[]);
    for (what, hosts) in [
        (
            "all are slow, and one has a spare",
            vec![first, second.clone(), spare],
        ),
        (
            "one is slow beside a fast one",
            vec![fast.address.clone(), second],
        ),
    ] {
        let (_, heard) = scene.ask(&hosts, false, what, |_, _| {});
        stood_still(what, &heard);
        assert_eq!(heard.degraded, [""; 0], "{what}");
        assert_eq!(heard.recoveries, [], "{what}");
    }
}

#[test]
fn of_two_equally_slow_hosts_the_second_is_tried_once_and_kept() {
    let mut request = usual();
    request.max_tokens = Some(8);
    let scene = Scene::of(caller_with((2, 0)), request);
    let slow = Lie::Slow(Duration::from_millis(700));
    let (_one, one) = liar(&scene.caller, slow, 0, 0..30);
    let (_two, two) = liar(&scene.caller, slow, 0, 0..30);
    let mut conversation = scene.open(&[one, two], false);
    for most in [1, 0] {
        let (_, heard) = scene.ask_in(&mut conversation, "slow hosts", |_, _| {});
        assert!(heard.recoveries.len() <= most, "{:?}", heard.recoveries);
    }
}

#[test]
fn a_slow_host_of_all_layers_is_replaced_by_idle_spares() {
    let scene = Scene::new();
    let [first, second] = RANGES.map(|layers| scene.caller.host(layers, &[]));
    // The slow host is chosen: it is idle and covers more layers than the spares.
    let pause = Lie::Slow(Duration::from_secs(1));
    let (_slow, slow) = liar(&scene.caller, pause, 0, 0..30);
    let all = [first.address.clone(), second.address.clone(), slow];
    let what = "a slow host of all layers";
    let (done, heard) = scene.ask(&all, false, what, |_, _| {});
    stood_still(what, &heard);
    assert_eq!(heard.degraded, ["degraded"]);
    let hosts = done.route.iter().filter(|hop| hop.host.is_some());
    assert_eq!(hosts.count(), 2);
}

#[test]
fn a_host_slow_from_its_first_token_is_replaced_by_an_idle_spare() {
    let scene = Scene::new();
    // The slow host is chosen: it reaches the end of the model alone, the others need two hops.
    let honest = ["0-14", "15-19", "20-29"].map(|layers| scene.caller.host(layers, &[]));
    let pause = Lie::Slow(Duration::from_secs(1));
    let (_slow, slow) = liar(&scene.caller, pause, 0, 15..30);
    let all = honest.iter().map(|host| host.address.clone());
    let all: Vec<String> = all.chain([slow]).collect();
    let what = "slow from its first token";
    let (done, heard) = scene.ask(&all, false, what, |_, _| {});
    stood_still(what, &heard);
    assert_eq!(heard.degraded, ["degraded"]);
    assert_eq!(heard.recoveries.len(), 1);
    let hosts = done.route.iter().filter(|hop| hop.host.is_some());
    assert_eq!(hosts.count(), 3);
}

/// Conversation over hosts known by address, as `serve --shard` keeps them.
fn pooled(caller: &Caller, hosts: &[String]) -> Result<(Conversation, HostPool), ChatError> {
    let address = |host: &String| host.parse::<HostAddr>().expect("an address");
    let pool = HostPool::new(
        caller.runtime.handle().clone(),
        Arc::new(NodeKey::from_secret(&caller.key.secret())),
        hearthnet_transport::Config::default(),
        hosts.iter().map(address),
        caller.choice(),
    );
    Ok((caller.open_over(Box::new(pool.clone()), true)?, pool))
}

#[test]
fn a_stopped_host_does_not_block_connections_to_the_others() {
    let scene = Scene::of(caller_with((2, 0)), short());
    let fleet = Fleet::new(&scene.caller, 2);
    for host in &fleet.0 {
        stop(host);
        let began = Instant::now();
        let (mut conversation, _pool) = pooled(&scene.caller, &fleet.addresses()).expect("a route");
        println!("connected in {:.2} s", began.elapsed().as_secs_f64());
        let (_, heard) = scene.ask_in(&mut conversation, "beside a stopped host", |_, _| {});
        assert_eq!(heard.degraded, [""; 0]);
        host.signal(Signal::CONT);
    }
}

#[test]
fn the_next_chat_skips_a_session_whose_host_has_stopped() {
    let scene = Scene::of(caller_with((2, 0)), short());
    let fleet = Fleet::new(&scene.caller, 2);
    let (first, pool) = pooled(&scene.caller, &fleet.addresses()).expect("a route");
    let used: Vec<String> = first
        .route()
        .into_iter()
        .filter_map(|hop| hop.host)
        .collect();
    drop(first);
    for node in used {
        fleet.strike(&node, Fault::Stop);
        let began = Instant::now();
        let mut source = pool.clone();
        source.choice = scene.caller.choice();
        let next = scene.caller.open_over(Box::new(source), true);
        let mut next = next.expect("a route");
        println!("connected in {:.2} s", began.elapsed().as_secs_f64());
        assert!(
            next.route()
                .iter()
                .all(|hop| hop.host.as_ref() != Some(&node))
        );
        let (_, heard) = scene.ask_in(&mut next, "after its host has stopped", |_, _| {});
        assert_eq!(heard.degraded, [""; 0]);
    }
}

#[test]
fn a_chat_whose_only_host_is_silent_waits_for_it_once() {
    // It accepts connections, as a suspended process does, and sends nothing.
    let dark = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let node = NodeKey::from_secret(&[7; 32]).id();
    let host = format!("{}#{node}", dark.local_addr().unwrap());
    let home = Home::new();
    let args = [
        "chat",
        "Hello.",
        "--shard",
        &host,
        "--no-service",
        "--max-tokens",
        "2",
    ];
    let began = Instant::now();
    let answer = home.run(&[&args[..], &ENABLE].concat());
    println!("answered in {:.2} s", began.elapsed().as_secs_f64());
    assert_eq!(answer.status.code(), Some(0), "{}", text(&answer.stderr));
    let said = text(&answer.stderr);
    assert_eq!(
        said.matches("continuing without one host").count(),
        1,
        "{said}"
    );
    assert_eq!(
        said.matches("this machine answers alone").count(),
        1,
        "{said}"
    );
    assert!(!answer.stdout.is_empty());
}

#[test]
fn a_host_that_dies_during_the_connect_is_replaced_by_its_spare() {
    let scene = Scene::of(caller_with((2, 0)), short());
    let mut fleet = Fleet::new(&scene.caller, 2);
    // Each round kills its host a bit later, from the first byte of the connection to the first
    // row.
    for round in 0..24 {
        let victim = round % fleet.0.len();
        let after = Duration::from_millis(3 * round as u64);
        let (addresses, began) = (fleet.addresses(), Instant::now());
        let what = format!("host {victim} dies after {after:?}");
        let (_, heard) = std::thread::scope(|scope| {
            let victim = &fleet.0[victim];
            scope.spawn(move || {
                std::thread::sleep(after.saturating_sub(began.elapsed()));
                victim.signal(Signal::KILL);
            });
            let opened = pooled(&scene.caller, &addresses);
            let (mut conversation, _pool) =
                opened.unwrap_or_else(|error| panic!("{what}: {error}"));
            scene.ask_in(&mut conversation, &what, |_, _| {})
        });
        assert!(!heard.local, "{what}: there was a spare");
        wait_for_end(fleet.0[victim].process.child.id());
        fleet.0[victim] = scene.caller.host(RANGES[victim % RANGES.len()], &[]);
    }
}

#[test]
fn a_pulled_cable_costs_seconds_but_no_token() {
    let Some(lab) = Lab::or_skip(5, 1) else {
        return;
    };
    let homes: Vec<_> = lab.hosts().iter().map(Home::on).collect();
    let lab = Arc::new(lab);
    // This thread and all threads that it starts are on machine 0, with the caller.
    let (here, cables) = (lab.host(0).clone(), Arc::clone(&lab));
    let run = move || {
        let scene = Scene::new();
        let admit = scene.caller.key.id().to_string();
        let start = |n: usize| {
            let listen = format!("{}:0", cables.host(n).v4());
            let listen = ["--listen", &listen];
            Host::start(&homes[n], model(), RANGES[n % 2], &admit, &listen)
        };
        let fleet = Fleet((1..5).map(start).collect());
        for (victim, position) in [(0, 0), (1, 5), (0, 25)] {
            let what = format!("the cable of host {victim} is pulled at token {position}");
            let mut pulled = 0;
            let (mut conversation, _pool) =
                pooled(&scene.caller, &fleet.addresses()).expect("a route");
            let (_, heard) = scene.ask_in(&mut conversation, &what, |token, route| {
                if token == position {
                    // Machine 0 is the caller's.
                    pulled = 1 + fleet.place(&route[victim]);
                    cables.host(pulled).unplug(0);
                }
            });
            stood_still(&what, &heard);
            assert_eq!(heard.degraded.len(), 1, "{what}");
            assert_eq!(heard.recoveries.len(), 1, "{what}");
            assert!(!heard.local, "{what}: there was a spare");
            cables.host(pulled).plug(0);
        }
    };
    here.run(run)
        .join()
        .expect("no failure on the lab's machine");
}
