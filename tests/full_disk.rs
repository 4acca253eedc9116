//! Full disks during `model pull` and under a community's log. The disk is a small tmpfs in a mount
//! namespace of the test's own. Where the system allows no such namespace, the test says so and
//! ends.
#![cfg(target_os = "linux")]

use std::process::{Command, Output, Stdio};

use crate::support::*;

/// Pulls onto a disk that is too small for the file, and again once it is large enough. `$1` is the
/// mount point, `$2` the model's file, the rest the command.
const SCRIPT: &str = r#"
disk=$1; model=$2; shift 2
mount -t tmpfs -o size=40m tmpfs "$disk" || exit 77
pull() {
    XDG_CACHE_HOME=$disk "$@" --from "$model" >"$out" 2>&1
    echo "status $?"
    sed 's/^/said /' "$out"
    find "$disk" -type f -size +0 -printf 'left %f %s\n'
}
out=$(mktemp)
pull "$@"
echo more-room
mount -o remount,size=200m "$disk"
pull "$@"
rm -f "$out"
"#;

/// Runs a script with a disk of its own at `$1` and a program as its last arguments, in a mount
/// namespace. `None` if no namespace can be created.
pub(crate) fn on_a_disk(
    home: &Home,
    script: &str,
    more: &[&str],
    program: &Command,
) -> Option<Output> {
    let Some(mut command) = namespace() else {
        eprintln!("not tried: there is no mount namespace here");
        return None;
    };
    let disk = home.path().join("disk");
    std::fs::create_dir(&disk).expect("a directory");
    command
        .args(["sh", "-c", script, "sh"])
        .arg(&disk)
        .args(more)
        .stdin(Stdio::null());
    wrap(&mut command, program);
    Some(command.output().expect("unshare starts"))
}

/// `unshare` with the flags that work here, if any do.
fn namespace() -> Option<Command> {
    for flags in [&["--mount"][..], &["--map-root-user", "--mount"]] {
        let mut command = Command::new("unshare");
        command.args(flags);
        let probe = Command::new("unshare")
            .args(flags)
            .args(["mount", "-t", "tmpfs", "tmpfs", "/mnt"])
            .stdin(Stdio::null())
            .output();
        match probe {
            Ok(output) if output.status.success() => return Some(command),
            Ok(output) => eprintln!("{}", text(&output.stderr)),
            Err(error) => eprintln!("{error}"),
        }
    }
    None
}

#[test]
fn a_full_disk_fails_a_pull_with_a_hint_and_a_later_pull_succeeds() {
    let home = Home::new();
    let pull = home.hearthnet(&["model", "pull", "smollm2-135m-instruct"]);
    let Some(output) = on_a_disk(&home, SCRIPT, &[model()], &pull) else {
        return;
    };
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    let (small, large) = out.split_once("more-room\n").expect("two attempts");

    assert!(small.starts_with("status 8\n"), "{out}");
    assert_contains(
        small,
        &[
            "No space left on device",
            "free some space there",
            "XDG_CACHE_HOME",
        ],
    );
    assert!(!small.contains("panicked"), "{out}");
    let files = |said: &str| -> Vec<String> {
        let lines = said.lines().filter_map(|line| line.strip_prefix("left "));
        lines.map(str::to_owned).collect()
    };
    assert!(files(small).is_empty(), "half-written: {out}");

    assert!(large.starts_with("status 0\n"), "{out}");
    let whole = "SmolLM2-135M-Instruct.Q4_1.gguf 98362432";
    // Beside the model: the hash cache, and the key that authenticates it.
    let known = [
        "SmolLM2-135M-Instruct.Q4_1.gguf.hearthnet ",
        "record.key 32",
    ];
    let (record, models): (Vec<String>, Vec<String>) = files(large)
        .into_iter()
        .partition(|file| known.iter().any(|known| file.starts_with(known)));
    assert_eq!((models, record.len()), (vec![whole.to_owned()], 2), "{out}");
}

/// Founds a community and serves it on a disk that then fills up and is emptied again. `$1` is the
/// mount point, the rest the program with its settings.
const LOG: &str = r#"
disk=$1; shift
mount -t tmpfs -o size=20m tmpfs "$disk" || exit 77
"$@" community create Elm --research on >/dev/null || exit
mkfifo "$disk/ready"
"$@" serve --listen 127.0.0.1:0 --http 127.0.0.1:0 --json >"$disk/ready" 2>/dev/null &
daemon=$!
read -r _ <"$disk/ready"
look() { echo "--- $1"; shift; "$@" 2>&1; echo "exit $?"; }
look before "$@" status
dd if=/dev/zero of="$disk/fill" bs=1M count=30 2>/dev/null
look full "$@" status
look refused "$@" community invite --level trusted
rm "$disk/fill"
look after "$@" status
kill "$daemon"; wait "$daemon"
dd if=/dev/zero of="$disk/fill" bs=1M count=30 2>/dev/null
look alone "$@" status
rm "$disk/fill"
mount -o remount,ro "$disk"
look read-only "$@" status
"#;

#[test]
fn an_unwritable_disk_is_reported_unhealthy_with_a_hint() {
    let home = Home::new();
    let mut program = home.hearthnet(&[&QUIET[..], &ENABLE].concat());
    program.env("HEARTHNET_DATA_DIR", home.path().join("disk/data"));
    let Some(output) = on_a_disk(&home, LOG, &[], &program) else {
        return;
    };
    let out = text(&output.stdout);
    assert!(output.status.success(), "{out}{}", text(&output.stderr));
    let part = |name: &str| {
        let (_, rest) = out.split_once(&format!("--- {name}\n")).expect("a part");
        rest.split("--- ").next().expect("a part").to_owned()
    };
    for name in ["before", "after"] {
        let said = part(name);
        assert!(said.contains("; healthy\nexit 0"), "{out}");
    }
    let full = part("full");
    assert!(full.contains("NOTHING CAN BE WRITTEN"), "{out}");
    assert!(full.contains("No space left on device"), "{out}");
    assert!(!full.contains("healthy"), "{out}");
    for name in ["refused", "alone", "read-only"] {
        let said = part(name);
        assert!(said.contains("exit 9"), "{out}");
        assert!(said.contains("free some space on"), "{out}");
    }
    assert!(part("read-only").contains("Read-only file system"), "{out}");
}
