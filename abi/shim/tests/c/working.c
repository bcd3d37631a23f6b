/* The working directory in a folder of ours, and patterns of paths. */
#include "check.h"

#include <glob.h>
#include <sys/wait.h>

static void is_at(const char *path)
{
    char room[PATH_MAX], *given;
    CHECK(getcwd(room, sizeof room) == room && strcmp(room, path) == 0);
    CHECK((given = getcwd(NULL, 0)) && strcmp(given, path) == 0);
    free(given);
    CHECK((given = get_current_dir_name()) && strcmp(given, path) == 0);
    free(given);
    CHECK(!getcwd(room, strlen(path)) && errno == ERANGE);
    CHECK(getcwd(room, strlen(path) + 1));
    CHECK(realpath(".", room) && strcmp(room, path) == 0);
}

/* The child of a vfork goes somewhere. */
static void vfork_goes(const char *to, const char *there)
{
    int state;
    pid_t child = vfork();
    if (child == 0)
        _exit(chdir(to) || access(there, X_OK));
    CHECK(waitpid(child, &state, 0) == child && state == 0);
}

static void paths(void)
{
    int found, before = open(".", O_RDONLY | O_DIRECTORY);
    FAILS(chdir(DEVICE "/node_type"), ENOTDIR);
    FAILS(chdir(DEVICE "/none"), ENOENT);
    CHECK(chdir(DEVICE) == 0);
    is_at(DEVICE);
    int file = open("ports/1/state", O_RDONLY);
    CHECK(reads(file, "4: ACTIVE\n"));
    FAILS(access("none", F_OK), ENOENT);
    FAILS(access("", F_OK), ENOENT);
    CHECK(access("../../../../dev/null", W_OK) == 0);
    CHECK(access("/dev/null", W_OK) == 0);
    DIR *list = opendir(".");
    CHECK(list && entries(list, "fw_ver", &found) == 10 && found);
    closedir(list);
    glob_t paths;
    CHECK(glob("ports/*/g*", 0, NULL, &paths) == 0 && paths.gl_pathc == 2);
    CHECK(strcmp(paths.gl_pathv[1], "ports/1/gids") == 0);
    globfree(&paths);
    CHECK(chdir("ports/1/..") == 0);
    is_at(DEVICE "/ports");
    CHECK(chdir("..") == 0);
    is_at(DEVICE);

    /* A forked child is at the same place, and its leaving is its own. */
    int state;
    pid_t child = fork();
    if (child == 0)
        _exit(access("node_type", R_OK) || chdir("/usr") || access("bin", X_OK));
    CHECK(waitpid(child, &state, 0) == child && state == 0);
    child = vfork();
    if (child == 0)
        _exit(chdir("/usr"));
    CHECK(waitpid(child, &state, 0) == child && state == 0);
    CHECK(access("node_type", R_OK) == 0);

    /* Wherever the child of a vfork goes, its parent stays; a forked one goes from folder to folder. */
    vfork_goes("/dev/infiniband", ".");
    is_at(DEVICE);
    vfork_goes("/sys/class", ".");
    is_at(DEVICE);
    vfork_goes("/usr", "bin");
    is_at(DEVICE);
    child = fork();
    if (child == 0) {
        CHECK(chdir("ports") == 0);
        is_at(DEVICE "/ports");
        vfork_goes(DEVICE, ".");
        is_at(DEVICE "/ports");
        _exit(failures != 0);
    }
    CHECK(waitpid(child, &state, 0) == child && state == 0);
    is_at(DEVICE);

    CHECK(chdir("../../../../usr") == 0);
    is_at("/usr");
    FAILS(access("node_type", R_OK), ENOENT);
    int ports = open(DEVICE "/ports", O_RDONLY);
    CHECK(fchdir(ports) == 0);
    is_at(DEVICE "/ports");
    CHECK(chdir("/sys/class") == 0);
    is_at("/sys/class");
    FAILS(access("1", R_OK), ENOENT);

    /* The child of a vfork goes there, and its parent does not. */
    CHECK(chdir("/usr") == 0);
    child = vfork();
    if (child == 0)
        _exit(chdir(DEVICE));
    CHECK(waitpid(child, &state, 0) == child && state == 0);
    is_at("/usr");
    CHECK(access("bin", X_OK) == 0);
    CHECK(fchdir(before) == 0);
}

static void patterns(void)
{
    glob_t found = {0};
    CHECK(glob(DEVICE "/ports/*/gids/?", 0, NULL, &found) == 0 && found.gl_pathc == 10);
    CHECK(strcmp(found.gl_pathv[3], DEVICE "/ports/1/gids/3") == 0);
    CHECK(glob(DEVICE "/hca_typ[e]", GLOB_APPEND, NULL, &found) == 0);
    CHECK(found.gl_pathc == 11 && strcmp(found.gl_pathv[10], DEVICE "/hca_type") == 0);
    CHECK(!(found.gl_flags & GLOB_ALTDIRFUNC) && !found.gl_opendir);
    CHECK(glob("/dev/nul[l]", GLOB_APPEND, NULL, &found) == 0 && found.gl_pathc == 12);
    globfree(&found);
    CHECK(glob(DEVICE "/none*", 0, NULL, &found) == GLOB_NOMATCH);
}

int main(void)
{
    paths();
    patterns();
    return failures != 0;
}
