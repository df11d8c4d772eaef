/* Test double of the management library: whether it fits the loaded module, and nothing else. */
#include <stdio.h>
#include <string.h>

#define DRIVER_NOT_LOADED 9
#define LIB_RM_VERSION_MISMATCH 18

int nvmlInit_v2(void)
{
	char text[256] = "";
	FILE *version = fopen("/proc/driver/nvidia/version", "r");

	if (!version)
		return DRIVER_NOT_LOADED;
	if (!fgets(text, sizeof(text), version))
		text[0] = 0;
	fclose(version);
	return strstr(text, "  " NV_VERSION "  ") ? 0 : LIB_RM_VERSION_MISMATCH;
}

int nvmlShutdown(void)
{
	return 0;
}

int nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
	snprintf(version, length, "%s", NV_VERSION);
	return 0;
}
