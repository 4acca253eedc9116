//! Secrets of users: invite codes and the passphrase of the root key need not be given on a command
//! line, and a sealed root key is useless without its passphrase. The root key keeps its rights,
//! whatever the level of its node. Real processes, and a terminal.

use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Output, Stdio};

use crate::support::community::{code, founded, founder, invites, join, members, static_peer};
use crate::support::*;

const WORDS: &str = "correct horse battery staple";
const OTHERS: &str = "seven slow snails sing";

fn root_key(home: &Home) -> PathBuf {
    home.path().join("data/root.key")
}

/// Runs a command with these lines on its standard input.
fn with_input(home: &Home, args: &[&str], lines: &str) -> Output {
    home.run_with(&[&QUIET[..], args].concat(), lines)
}

/// Community with a sealed root key.
fn sealed() -> Home {
    let home = Home::new();
    let create = ["community", "create", "Elm", "--passphrase", "--json"];
    succeeded(&with_input(&home, &create, &format!("{WORDS}\n")));
    home
}

const ANCHOR: [&str; 5] = ["community", "invite", "--level", "anchor", "--json"];

#[test]
fn invite_codes_can_be_read_from_standard_input() {
    let (founder, node) = founded(&[]);
    let code = code(&founder, &["--uses", "2"]);
    let member = Home::new();
    let join = [&static_peer(&node)[..], &["community", "join", "-"]].concat();
    succeeded(&with_input(&member, &join, &format!("{code}\r\n")));
    let withdraw = ["community", "withdraw", "-"];
    succeeded(&with_input(&founder, &withdraw, &format!("{code}\n")));
    // Without a code and without a terminal, the command does not wait for input.
    let nobody = Home::new();
    assert_fails(
        &nobody.run(&["community", "join", "--json"]),
        2,
        "bad_config",
    );
    let empty = with_input(&nobody, &["community", "join", "-", "--json"], "\n");
    assert_fails(&empty, 2, "bad_config");
}

#[test]
fn a_sealed_root_key_signs_only_with_its_passphrase() {
    let home = sealed();
    let file = std::fs::read_to_string(root_key(&home)).expect("a file");
    assert!(!file.contains("ed25519-secret"), "{file}");
    // Commands that do not need the root key do not ask for a passphrase.
    succeeded(&home.run(&["community", "invite", "--json"]));
    assert_fails(&home.run(&ANCHOR), 2, "bad_config");
    let wrong = with_input(&home, &ANCHOR, "correct horse\n");
    assert_fails(&wrong, 9, "wrong_passphrase");
    succeeded(&with_input(&home, &ANCHOR, &format!("{WORDS}\n")));
    let file = home.path().join("words");
    std::fs::write(&file, format!("{WORDS}\n")).expect("a file");
    let file = file.to_str().expect("a UTF-8 path");
    succeeded(&home.run(&[&ANCHOR[..], &["--passphrase-file", file]].concat()));
    // The same beside a daemon, which writes the events.
    let node = community::serve(&home, &[]);
    let wrong = with_input(&home, &ANCHOR, "correct horse\n");
    assert_fails(&wrong, 9, "wrong_passphrase");
    succeeded(&with_input(&home, &ANCHOR, &format!("{WORDS}\n")));
    drop(node);
    let invites = invites(&home);
    let anchors = invites.iter().filter(|it| it["level"] == "anchor");
    assert_eq!(anchors.count(), 3);
}

#[test]
fn a_passphrase_can_be_set_changed_and_removed() {
    let home = founder();
    let passphrase = ["community", "passphrase"];
    let short = with_input(&home, &passphrase, "horse\n");
    assert_complains(&short, "at least 8 characters");
    succeeded(&with_input(&home, &passphrase, &format!("{WORDS}\n")));
    assert_fails(
        &with_input(&home, &ANCHOR, "wrong words\n"),
        9,
        "wrong_passphrase",
    );
    let wrong = with_input(&home, &passphrase, &format!("{OTHERS}\n{OTHERS}\n"));
    assert_complains(&wrong, "sealed with another passphrase");
    let changed = with_input(&home, &passphrase, &format!("{WORDS}\n{OTHERS}\n"));
    succeeded(&changed);
    assert_fails(
        &with_input(&home, &ANCHOR, &format!("{WORDS}\n")),
        9,
        "wrong_passphrase",
    );
    succeeded(&with_input(&home, &ANCHOR, &format!("{OTHERS}\n")));
    let remove = ["community", "passphrase", "--remove"];
    succeeded(&with_input(&home, &remove, &format!("{OTHERS}\n")));
    succeeded(&home.run(&ANCHOR));
    let file = std::fs::read_to_string(root_key(&home)).expect("a file");
    assert!(
        file.starts_with("ed25519-secret:"),
        "it is a key file again"
    );
}

#[test]
fn a_passphrase_prompt_does_not_echo() {
    let home = sealed();
    let (mut terminal, stream) = terminal();
    let mut command = home.hearthnet(&ANCHOR);
    command
        .stdin(stream())
        .stdout(Stdio::piped())
        .stderr(stream());
    let child = command.spawn().expect("hearthnet starts");
    drop(command);
    let mut screen = Vec::new();
    let mut piece = [0; 1024];
    let mut typed = false;
    while let Ok(count @ 1..) = terminal.read(&mut piece) {
        screen.extend(&piece[..count]);
        if !typed && text(&screen).contains("passphrase of the root key: ") {
            // With a typing error and a backspace.
            let keys = format!("{WORDS}x\u{7f}\n");
            terminal.write_all(keys.as_bytes()).expect("a terminal");
            typed = true;
        }
    }
    succeeded(&child.wait_with_output().expect("its end"));
    let screen = text(&screen);
    assert!(typed && !screen.contains("correct"), "{screen}");
}

#[test]
fn the_root_key_keeps_its_rights_whatever_the_level_of_its_node() {
    let (founder, node) = founded(&[]);
    let other = join(&founder, &node);
    founder.says(&["community", "promote", &other.node_id(), "anchor"]);
    let own = founder.node_id();
    let level = || {
        let mut members = members(&founder).into_iter();
        let own = members.find(|one| one["this_node"] == true);
        own.expect("this node")["level"].clone()
    };
    // Signed by the root key, because the level of its own node is lowered.
    founder.says(&["community", "demote", &own, "member"]);
    assert_eq!(level(), "member");
    founder.says(&["community", "policy", "--research", "off"]);
    founder.says(&["community", "invite", "--level", "trusted"]);
    founder.says(&["community", "promote", &own, "anchor"]);
    assert_eq!(level(), "anchor");
    founder.says(&["community", "revoke", &other.node_id(), "--yes"]);
    drop(node);
}
