#pragma once

// Publication of a page's files as one generation.
//
// A page is up to four files of one directory: NAME, NAME.ckpt, NAME.lora, NAME.dft. There is a page where there is NAME.
// Whatever happens at whatever moment (an error of the disk, a crash, a loss of power), a reader finds all files of the old
// generation, or all of the new one, or gets an error that says what is wrong. It never finds some of each.
//
//   .page-lock                        held shared by who reads, exclusively by who commits, recovers or makes a
//                                     stage; not while the big files are written
//   NAME.page-staging/                there only while something is under way, or was when somebody died
//       PID-N/                        a stage, of one publication
//           .lock                     locked for as long as its owner lives: a pid alone proves nothing, it is used
//                                     again and means another process in another container
//           NAME, NAME.ckpt, ...      the new generation
//       commit                        the record: from here on the new generation is the one that counts
//
// publish():
//   1. a stage is made, the files are written into it and synced, and every directory up to here
//   2. under the lock: what an earlier crash left of this name is completed or swept
//   3. the record is written beside its place, synced, renamed to `commit`; the directory is synced
//   4. the files are moved over the old ones, sidecars that the new generation lacks are removed; the directory is synced
//   5. the record is dropped, and that is synced. This last sync may fail with no more than a warning: a record that comes
//      back lists what is in place already, and completing it again changes nothing.
//   6. the stage is removed, and the staging directory where it is empty
//
// A failure before the record leaves the old generation and no stage. After it, whoever next reads or writes the name takes
// up at step 4, each part of which may have been done already. Before he moves anything he reads what is in the stage and
// what is in its place already: the record has the checksum of each file, and what was damaged since it was written, or is
// another file, does not replace a good page.
//
// A record that cannot be read, or that lists what is not there, is reported and left as it is: nothing is guessed. It blocks
// the name: publish() and read() refuse it until `llamactl pages fsck` has put it aside.
//
// A sweep removes what a publication makes and nothing else: a file of somebody's in a stage is left, and told.
//
// What survives what, and the test that shows it (tests/native, and the last ones on the running server in tests/):
//
//   operation       | failure                              | what is there afterwards          | test
//   ----------------|--------------------------------------|-----------------------------------|-----
//   first publish   | any verb, before the record          | nothing, and no stage             | every_verb_fails_in_a_first_publication
//   first publish   | any verb, after the record           | all of it, completed by the next  | every_verb_fails_in_a_first_publication
//   replacement     | any verb                             | all of the old or all of the new  | every_verb_fails_in_a_replacement_with_more_files
//   replacement     | any verb; sidecars are retired       | all of the old or all of the new  | every_verb_fails_in_a_replacement_with_fewer_files
//   publish         | sync of a directory                  | no success, and no lost record    | a_directory_that_cannot_be_synced_is_never_success
//   publish         | over an interrupted one, any verb    | one of the three, whole           | every_verb_fails_in_a_publication_that_finds_an_interrupted_one
//   publish         | the process dies at any verb         | old or new, no stage after that   | a_process_dies_at_every_verb_of_a_publication
//   publish         | the process is killed                | its lock is gone, nobody waits    | a_killed_process_holds_nobody_up
//   publish         | power is lost at any verb            | done means durable, else old/new  | power_is_lost_in_a_replacement_with_more_files
//   publish         | two at once, and readers             | every read is one generation      | processes_publish_and_read_one_name
//   publish         | disk full, half-way                  | the old generation                | a_disk_with_room_for_half_a_page_keeps_the_old_one
//   publish         | RLIMIT_FSIZE                         | the old generation, no signal     | the_limit_for_the_size_of_a_file_is_no_space_and_no_signal
//   publish         | a link, pipe or directory in the way | what stands there, an error       | what_is_no_file_in_the_place_of_one_is_an_error_and_stays
//   publish         | another program's file comes         | that and the old one, an error    | what_a_guard_refuses_is_not_replaced
//   recovery        | any verb                             | old or new, and it can be tried   | every_verb_fails_in_a_recovery
//   recovery        | the process dies, or power is lost   | old or new                        | power_is_lost_while_a_dead_publication_is_read_or_recovered
//   recovery        | the owner of a stage is alive        | the stage                         | a_stage_is_swept_when_its_owner_is_dead_and_only_then
//   recovery        | a staged file was damaged            | the old generation, an error      | what_was_damaged_after_its_record_replaces_nothing
//   recovery        | a staged file is gone                | the old generation, an error      | a_page_whose_staged_successor_is_gone_stays
//   recovery        | another program's file in a place    | that, an error that names it      | another_programs_file_stops_a_recovery
//   recovery        | foreign files in a stage             | these, an error that names one    | foreign_files_in_a_dead_stage_are_left_and_told
//   reading         | any verb                             | everything, the reader has error  | every_verb_fails_in_reading
//   reading         | power is lost afterwards             | what was read                     | a_generation_that_was_read_is_durable
//   reading         | the directory may not be written     | everything, and it is read        | a_directory_that_may_not_be_written_is_read_unless_something_is_unfinished
//   any             | the record is damaged                | everything, an error that says so | a_damaged_record_is_named_and_left
//   any             | the same, and fsck                   | what is good, the name is free    | a_page_that_is_good_without_the_damaged_record_stays
//   listing, fsck   | what is no staging directory         | everything, an error for the name | what_is_no_staging_directory_stops_nothing_but_its_name
//   any             | a name that is a path                | everything, an error              | hostile_names_are_refused_everywhere
//
// The locks are advisory: other programs that write these names are not kept out, only asked about once more before a
// commit. They are not fair either: readers that never leave a gap hold up who commits.
//
// Names that differ in nothing but letter case are one file on some file systems (Windows, macOS): there the second page
// replaces the first one.

#include "server-page-checksum.h"
#include "server-page-file-name.h"
#include "server-page-os.h"

#include <functional>
#include <string>
#include <vector>

struct server_page_file {
    std::string suffix; // "", ".ckpt", ".lora" or ".dft"

    std::vector<server_page_span> parts; // its contents, one after another
};

enum server_page_files_status {
    SERVER_PAGE_FILES_OK,        // a message beside it is a warning
    SERVER_PAGE_FILES_NOT_FOUND, // there is no such page, or no such directory
    SERVER_PAGE_FILES_BAD_NAME,  // or files that make no page
    SERVER_PAGE_FILES_DECLINED,  // the reader did not want that much
    SERVER_PAGE_FILES_NO_SPACE,
    SERVER_PAGE_FILES_NO_ACCESS,
    SERVER_PAGE_FILES_CORRUPT,   // the record, or what it lists; fsck puts it aside
    SERVER_PAGE_FILES_IO,        // anything else the operating system said; a symlink that stands in the way
    SERVER_PAGE_FILES_PENDING,   // publish: the record may be placed, the rest failed. The next read or write of the name
                                 // completes the new generation, or finds the old one if the record was lost
};

struct server_page_files_result {
    server_page_files_status status = SERVER_PAGE_FILES_OK;

    std::string message; // what was tried, on which file, what came back

    bool ok() const { return status == SERVER_PAGE_FILES_OK; }
};

struct server_page_generation {
    struct file {
        std::string suffix;
        uint64_t    n_bytes = 0;
    };

    std::string name;

    std::vector<file> files; // none with the suffix "": sidecars that belong to nothing

    bool staged = false; // there is a staging directory, or what stands in its place: something for recover()
};

// refuses what may not be replaced under the names of a page; asked under the lock, before anything is moved or removed
// nothing is known here of what the files hold: whoever uses this has the rule, see server-page-guard.h
typedef std::function<server_page_files_result(server_page_os & os, const std::string & dir, const std::string & name)> server_page_guard;

struct server_page_files {
    // the directory must be there when something is published
    server_page_files(server_page_os & os, const std::string & dir, const server_page_guard & guard = nullptr);

    // all or nothing, in place of the generation of that name if there is one; one of the files must be NAME itself
    server_page_files_result publish(const std::string & name, const std::vector<server_page_file> & files);

    // one generation: `allocate` is called for every one of the suffixes of which there is a file, before any contents are
    // read; it returns n_bytes of memory, or nullptr where that is more than the caller wants. It must not call back into
    // this. No memory is needed for an empty file. A publication that was interrupted after its record is completed first.
    server_page_files_result read(const std::string & name, const std::vector<std::string> & suffixes,
            const std::function<uint8_t * (const std::string & suffix, uint64_t n_bytes)> & allocate);

    // complete a publication that has a record, sweep stages whose owner is dead; `done` tells what was or would be done
    server_page_files_result recover(const std::string & name, bool dry_run, std::vector<std::string> & done);

    // in the order of their names
    server_page_files_result list(std::vector<server_page_generation> & generations);

private:
    server_page_os & os;

    const std::string       dir;
    const server_page_guard guard;
};
